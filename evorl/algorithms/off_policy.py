"""The base class of off-policy algorithms with a replay: settings, pace and storage.

Axes: P agents, E environments, B batch, C critics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from evorl.algorithms.base import Objective, PerAgent, hyperparameter
from evorl.algorithms.functional import n_step_return, squared_error
from evorl.config import Config
from evorl.config.fields import AlgorithmSettings, Fraction, Positive, Size
from evorl.distributed import Placement
from evorl.envs.spaces import EnvSpec, ObservationSpecs
from evorl.networks import NETWORKS, initial_architecture
from evorl.networks.stack import NetworkSpec, Stack, TargetRule
from evorl.replay import Experience, Pace
from evorl.replay.storage import Field as StoredField
from evorl.replay.transitions import replay_experience
from evorl.system.console import Stopwatch
from evorl.types import Batch, Head, Loss, Streams, UserError

REPORT_EVERY = 17
"""Updates from one report of metrics to the next; for small networks, metrics cost a tenth of an update. A prime, since
agents with a larger `learn_step` than others are due in every second or fourth update, and might never be reported."""
TWIN_CRITICS = ("first", "second")
"""The heads of the twin critics Q1 and Q2, which name their tensors in checkpoints."""
Rate = Annotated[float, Field(gt=0, le=1)]
UpdatePeriod = Annotated[float, Field(ge=1e-3, le=1e9)]


class ReplayedSettings(AlgorithmSettings):
    """The settings of all algorithms that learn from a replay."""

    batch_size: Size = 256
    """Transitions in an agent's update, on each rank; see `split_batches`."""
    learning_rate: Rate = 1e-3
    """The learning rate of Adam."""
    gamma: Fraction = 0.99
    """The discount of a step."""
    learn_step: UpdatePeriod = 1
    """Environment steps of an agent for each of its updates, on each rank; see `split_batches`."""
    tau: Rate = 5e-3
    """The share of the way that a target network follows in each of its updates."""
    max_grad_norm: Positive | None = None
    """The norm to which a gradient of an agent is clipped; null leaves it as it is."""
    normalize_observations: bool = False
    """Shift and scale vectors by the running mean and variance of what the replay was given."""

    replayed: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "learning_rate",
        "gamma",
        "learn_step",
        "tau",
        "max_grad_norm",
    )
    near_one: ClassVar[tuple[str, ...]] = ("gamma",)


class Replayed:
    """An off-policy algorithm that learns from a replay of all agents' transitions."""

    noise_shape: tuple[int, int] = 0, 0
    stored_action: StoredField
    """The shape and type of an action in the replay, which stores the environment's actions."""

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        self.config = config
        self.settings = config.algorithm
        self.interface = interface
        if config.network.recurrent:
            raise UserError(
                f"network.recurrent: {self.settings.name} cannot be recurrent; leave {config.network.recurrent!r} out, "
                "or use ppo"
            )
        vectors = [name for name, part in interface.parts.items() if part.kind == "vector"]
        self._normalized = vectors if self.settings.normalize_observations else []

    def network(
        self,
        parts: ObservationSpecs,
        heads: Sequence[Head],
        streams: Streams,
        target: TargetRule | None = None,
        noise: float | None = None,
    ) -> NetworkSpec:
        """Return the spec of a network of the configured kind that reads these parts of the observation."""
        settings = self.config.network
        normalized = [name for name in self._normalized if name in parts]
        network = NETWORKS[settings.name](settings, parts, heads, normalized, noise)
        return NetworkSpec(network, initial_architecture(settings, parts, streams), target)

    def objective(
        self, network: str, loss: Callable[[Stack, Batch, torch.Generator], Loss], rate: PerAgent, every: int = 1
    ) -> Objective:
        """Return the objective of a network, with gradient clipping if `max_grad_norm` is set."""
        clip = None if self.settings.max_grad_norm is None else hyperparameter("max_grad_norm")
        return Objective(network, loss, rate, every, clip, REPORT_EVERY)

    def actor_state(self, index: int, count: int) -> Mapping[str, float]:
        """Return {}: all actors are alike."""
        return {}

    def pace(self, copies: int) -> Pace:
        """Return the batch size and update-to-data ratio of a new agent; any number of ranks can share its batches."""
        settings, ranks = self.settings, 1 if self.settings.split_batches else copies
        return Pace(settings.batch_size * ranks, updates=1.0, steps=settings.learn_step * ranks)

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        """Return this rank's part of the replay."""
        return replay_experience(
            self.config,
            self.interface,
            self.stored_action,
            n_step_return,
            placement,
            always_valid,
            stopwatch,
            self._normalized,
        )


class StepCounting(Replayed):
    """An algorithm whose agents count their environment steps, the first of which take random actions."""

    def initial_state(self) -> dict[str, float]:
        """Return a new agent's acting state: its step count."""
        return {"steps": 0.0}

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Count `steps` further transitions over all ranks, given for each agent [P] or as one number for all."""
        stack.state["steps"] += steps

    def random_at_first(self, stack: Stack, action: Tensor, random: Callable[[], Tensor]) -> Tensor:
        """Return actions [P, E, ...], replaced by `random` ones for agents in their first `random_steps` steps."""
        steps = self.settings.exploration.random_steps
        if not steps:
            return action
        first = (stack.state["steps"] < steps).view(-1, *[1] * (action.dim() - 1))
        return torch.where(first, random(), action)


def actor_learning_rate(stack: Stack) -> Tensor:
    """Return the actors' learning rate [P]: `actor_learning_rate` if set, else `learning_rate`."""
    hparams: Mapping[str, Tensor] = stack.hyperparameters
    return hparams.get("actor_learning_rate", hparams["learning_rate"])


def critic_loss(q_values: Tensor, target: Tensor) -> Loss:
    """Squared td_error of critics' values Q(s, a) [C, P, B] from their common target [P, B], summed over critics.

    Priorities use the mean absolute td_error over critics.
    """
    td_error = q_values - target
    elements, _ = squared_error(td_error)
    errors = td_error.detach().abs().mean(0)
    return Loss(elements.sum(0), lambda: {"td_error": errors, "q_values": q_values.detach()[0]}, errors)
