"""The base class of algorithms, and the objectives that they minimise.

Axes: P agents, E environments, B batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from evorl.config import Config, check_name
from evorl.distributed import Placement
from evorl.envs.spaces import EnvSpec, ObservationSpecs
from evorl.kernels.library import usable_kernel
from evorl.networks import CELLS, NETWORKS, initial_architecture
from evorl.networks.stack import Architectures, NetworkSpec, Stack, TargetRule
from evorl.networks.standard import StandardNetwork
from evorl.replay import Experience
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent, Branches, Head
from evorl.types.batches import Batch, Loss, RecurrentInput
from evorl.types.messages import nearest
from evorl.types.outcomes import UserError
from evorl.types.tensors import Observation, Tensors

PerAgent = Callable[[Stack], Tensor]
"""Maps a stack to one number per agent [P]."""
LossFunction = Callable[[Stack, Batch, torch.Generator], Loss]
"""The loss of a batch; it may draw from the generator."""


@dataclass(frozen=True)
class Objective:
    """The loss and optimiser settings of one network in an update.

    `learning_rate` includes the learning rate schedule. `max_grad_norm` clips each agent's gradient by its own norm.
    Metrics of the loss are computed in every `report_every`-th of its updates.

    A network is updated in the first of every `every` updates of its agent (TD3's policy delay, arXiv 1802.09477). An
    agent's updates are counted by the optimiser steps of the first objective's network, whose `every` is 1.
    """

    network: str
    loss: LossFunction
    learning_rate: PerAgent
    every: int = 1
    max_grad_norm: PerAgent | None = None
    report_every: int = 1


def hyperparameter(name: str) -> PerAgent:
    """The function that reads a hyperparameter [P] of a stack."""
    return lambda stack: stack.hyperparameters[name]


class ActInput(NamedTuple):
    """Inputs of `Algorithm.act`.

    `observation` [P, E, ...]; `recurrent` is the state of recurrent networks or of exploration noise, where there is
    any. With `deterministic`, actions are the mode or greedy, and nothing is drawn from the generator.
    """

    observation: Observation
    recurrent: RecurrentInput | None
    generator: torch.Generator
    deterministic: bool = False

    @property
    def action_mask(self) -> Tensor | None:
        """The allowed actions [P, E, A], if the environment masks any."""
        return self.observation.get("action_mask")


@dataclass(slots=True)
class ActOutput:
    """Actions [P, E, ...] for the environment, `extras` to store with them, and the next recurrent or noise state."""

    action: Tensor
    extras: Tensors = field(default_factory=dict)
    recurrent_state: Tensor | None = None


class Algorithm(ABC):
    """Base class of algorithms: acting, experience and losses of stacks of agents. It holds no state of any agent.

    A subclass names its `metrics`, builds `networks` and `objectives` in its constructor, and implements `experience`,
    `act` and `value`. The rest are defaults: acting counts environment steps, all actors act alike, and no exploration
    noise carries over from step to step.
    """

    metrics: tuple[str, ...]
    """Names of the metrics that the losses report."""
    explores_by_noise: bool = False
    """True if exploration adds noise outside the policy, as epsilon-greedy does. Training returns are then lower
    than evaluation returns."""
    report_every: ClassVar[int] = 1
    """See `Objective`; with small networks, metrics cost a tenth of an update. A prime period samples all minibatches
    of an epoch in turn, and also the updates of agents that are due only in every second or fourth one."""
    is_actor_critic: ClassVar[bool] = False
    """True if the policy and its critics may read different parts of the observation."""
    networks: Mapping[str, NetworkSpec]
    """Each agent's networks by name. Parameters are drawn and laid out in memory in this order."""
    objectives: Sequence[Objective]
    """The objectives of an update, in the order in which they are minimised."""

    @classmethod
    def variant(cls, interface: EnvSpec) -> type[Algorithm]:
        """The class for an environment's action space, if losses depend on it. Raises UserError if there is none."""
        return cls

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        """Raises UserError if the algorithm does not support the environment's spaces or the settings."""
        self.config = config
        self.settings = config.algorithm
        self.interface = interface
        self._plays_both_seats = config.league is not None and config.league.learn_from == "both"
        self.policy_parts = self._read_by("policy_parts")
        self.critic_parts = self._read_by("critic_parts")
        vectors = {name: part for name, part in interface.parts.items() if part.kind == "vector"}
        self.normalized_parts: ObservationSpecs = vectors if self.settings.normalize_observations else {}

    def _read_by(self, setting: str) -> ObservationSpecs:
        """The parts of the observation that `network.SETTING` names. Raises UserError if there is no such part."""
        names, parts = getattr(self.config.network, setting), self.interface.parts
        if names is None:
            return parts
        if not self.is_actor_critic:
            raise UserError(f"network.{setting}: {self.settings.name} has no critic beside its policy; leave it out")
        for name in names:
            if name not in parts:
                raise UserError(
                    f"network.{setting}: {self.interface.environment} has no part {name!r} of the observation"
                    f"{nearest(name, list(parts))}"
                )
        return {name: part for name, part in parts.items() if name in names}

    def network(
        self,
        parts: ObservationSpecs,
        heads: Sequence[Head],
        branches: Branches,
        target: TargetRule | None = None,
        noise: float | None = None,
        unread: Mapping[str, Collection[str]] | None = None,
    ) -> NetworkSpec:
        """A network of the configured kind that reads these parts of the observation.

        `target` updates its copy. `noise` is the initial scale of noisy layers, None for layers without noise. `unread`
        names the parts that some heads do not read, by the names of these heads.
        """
        settings = self.config.network
        normalized = [name for name in self.normalized_parts if name in parts]
        # Training checks these names at launch, but a run that is loaded from a directory may have unknown ones.
        check_name("network.name", settings.name, NETWORKS)
        if settings.recurrent:
            check_name("network.recurrent", settings.recurrent, CELLS)
        network = NETWORKS[settings.name](settings, parts, heads, normalized, noise)
        network.kernel = usable_kernel(self.config.run.kernel)
        if unread:
            assert isinstance(network, StandardNetwork), "a module reads one part"
            network.hide(unread)
        return NetworkSpec(network, initial_architecture(settings, parts, branches), target)

    def objective(self, network: str, loss: LossFunction, rate: PerAgent, every: int = 1) -> Objective:
        """The objective of a network, with gradient clipping if `max_grad_norm` is set."""
        clip = None if self.settings.max_grad_norm is None else hyperparameter("max_grad_norm")
        return Objective(network, loss, rate, every, clip, self.report_every)

    def discount(self, gamma: Tensor) -> Tensor:
        """The factor [P] on the next value, from discounts gamma [P].

        It is -gamma where an agent plays both seats of a zero-sum game, since the next value is the other seat's
        (negamax). In n-step returns and advantages, its powers alternate in sign from turn to turn, as rewards do.
        """
        return -gamma if self._plays_both_seats else gamma

    def initial_state(self) -> dict[str, float]:
        """A new agent's acting state by name: non-negative numbers that acting changes, such as epsilon."""
        return {"steps": 0.0}

    def adopt(self, agent: Agent, origin: Any) -> Agent:
        """Adapt an agent that another run with the settings `origin` has trained, in place, and return it.

        By default there is nothing to do. Raises UserError if its networks mean something else here.
        """
        return agent

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Update the acting state by `steps` transitions over all ranks, given for each agent [P] or as one number."""
        stack.state["steps"] += steps

    def actor_state(self, index: int, count: int) -> Tensors:
        """The acting states in which actor `index` of `count`, over all ranks, differs from the learner.

        Each is one number, or one for each of the actor's environments [E].
        """
        return {}

    def batch_targets(self, stack: Stack, batch: Batch) -> Tensors:
        """Learning targets [P, B], by name, that are computed once for each batch, before the updates with it.

        Experience that uses a batch several times adds them to its columns.
        """
        return {}

    def noise_shape(self, architectures: Architectures) -> tuple[int, int]:
        """The shape [K, N] of exploration noise that carries over from step to step, in one environment of an agent.

        `architectures` are a stack's, by network. The default, (0, 0), means no such noise. `act` receives the noise as
        the recurrent state, which is initially zero, and returns the next.
        """
        return 0, 0

    def check_copies(self, copies: int) -> None:  # noqa: B027
        """Raise UserError if `copies` ranks that hold the same agents cannot share their batches."""

    @abstractmethod
    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        """This rank's experience buffer.

        `always_valid` says that every step of every environment is a transition.
        """

    @abstractmethod
    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Choose actions [P, E, ...] for observations [P, E, ...]."""

    @abstractmethod
    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """State values V(s) [P, E] of observations [P, E, ...]; asked only of algorithms that learn from rollouts."""
