"""Deep Q-learning, DQN (Mnih et al. 2015), and the parts of Rainbow (arXiv 1710.02298), each with its own setting.

The parts are double Q-learning (arXiv 1509.06461), dueling networks (1511.06581), distributional values (`values.py`),
noisy layers (1706.10295) and soft target updates (1509.02971). N-step returns and prioritised replay belong to the
replay.

Axes: P agents, E environments, B batch, A actions, N atoms of an action's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import gymnasium as gym
import torch
from pydantic import Field, model_validator
from torch import Tensor

from evorl.algorithms.base import ActInput, ActOutput, hyperparameter
from evorl.algorithms.exploration import EpsilonGreedy, random_choices
from evorl.algorithms.functional import (
    LossAndGradient,
    dueling,
    dueling_gradient,
    of_action,
    of_action_gradient,
)
from evorl.algorithms.off_policy import OffPolicy, Rate, UpdatePeriod
from evorl.algorithms.values import VALUES, ValueSettings
from evorl.config import Config
from evorl.config.fields import HyperparameterRange, Positive, Section, Size
from evorl.envs.spaces import EnvSpec, wrong_actions
from evorl.networks.distributions import FORBIDDEN
from evorl.networks.stack import Periodic, Polyak, Stack, StackedNetwork, TargetRule
from evorl.types import Batch, Head, Loss, Observation, RecurrentInput, Streams, Tensors

TARGETS: Mapping[str, TargetRule] = {"polyak": Polyak("tau"), "periodic": Periodic("target_period")}


class NoisyLayerSettings(Section):
    """Layers whose weights have noise of a learned scale."""

    sigma: Positive = 0.5
    """The first scale of the noise, times the root of a layer's inputs."""


class DQNSettings(ValueSettings):
    name: str = "dqn"
    double: bool = True
    """Let the online network choose the action that the target network values (arXiv 1509.06461)."""
    dueling: bool = False
    """Learn the value of states and the advantages of actions apart (arXiv 1511.06581)."""
    learning_rate: Rate = 2e-3
    learn_step: UpdatePeriod = 8
    target: Literal["polyak", "periodic"] = "polyak"
    """`polyak`: the target network follows in each update, a share `tau` of the way. `periodic`: it is copied every
    `target_period` updates (Mnih et al. 2015)."""
    tau: Rate = 2e-2
    target_period: Size | None = None
    """Updates from one copy of the network to the target network to the next."""
    noisy: NoisyLayerSettings | None = None
    """Explore by noise on the weights of the last hidden layer and of the heads (arXiv 1706.10295)."""
    exploration: EpsilonGreedy = Field(
        default_factory=lambda given: EpsilonGreedy(start=0, end=0) if given.get("noisy") else EpsilonGreedy()
    )
    """Noisy layers explore by themselves, so that with them there are no random actions unless this is configured."""

    hyperparameters: ClassVar[tuple[str, ...]] = (*ValueSettings.hyperparameters, "target_period")
    layer_norm: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=2e-4, max=8e-3),
        "batch_size": HyperparameterRange(min=128, max=512),
        "learn_step": HyperparameterRange(min=4, max=16),
    }

    @model_validator(mode="after")
    def _has_a_period_where_it_counts(self) -> Self:
        if (self.target == "periodic") != (self.target_period is not None):
            raise ValueError("`target: periodic` and `target_period` go together")
        return self


class DQN(OffPolicy):
    """Deep Q-learning for a stack of agents."""

    Settings = DQNSettings
    explores_by_noise = True
    state_limits: ClassVar[Mapping[str, float]] = {"epsilon": 1.0}
    stored_action = (), torch.int64

    def __init__(self, config: Config[DQNSettings], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        if not isinstance(interface.action, gym.spaces.Discrete):
            raise wrong_actions("dqn", interface, "Discrete")
        self.actions = int(interface.action.n)
        self.values = VALUES[self.settings.distribution](self.settings)
        self.metrics = self.values.metrics
        outputs = self.actions * self.values.atoms
        heads = [Head("q_values", outputs)]
        if self.settings.dueling:
            heads = [Head("advantage", outputs), Head("value", self.values.atoms)]
        # The streams of a dueling network split before the last hidden layer.
        streams: Streams = "last" if self.settings.dueling else "shared"
        target, noisy = TARGETS[self.settings.target], self.settings.noisy
        spec = self.network(interface.parts, heads, streams, target, None if noisy is None else noisy.sigma)
        self.networks = {"q": spec}
        self.objectives = [self.objective("q", self.loss, hyperparameter("learning_rate"))]

    def initial_state(self) -> dict[str, float]:
        """A new agent's exploration rate epsilon."""
        return {"epsilon": self.settings.exploration.start}

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Choose epsilon-greedy actions, or greedy ones if `deterministic`.

        Noisy layers draw new noise in each step, shared by all of an agent's environments. With `deterministic`, the
        mean weights are used.
        """
        mask, generator = inputs.action_mask, inputs.generator
        network = stack.networks["q"] if inputs.deterministic else stack.networks["q"].with_noise(generator)
        greedy = allowed(self.q_values(network(inputs.observation)), mask).max(-1).indices
        if inputs.deterministic:
            return ActOutput(greedy)
        explores = torch.rand(greedy.shape, generator=generator, device=greedy.device)
        random = random_choices(self.actions, greedy.shape, mask, generator)
        # [P, 1], or [P, E] in actors whose environments differ.
        epsilon = stack.state["epsilon"].view(len(explores), -1)
        return ActOutput(torch.where(explores < epsilon, random, greedy))

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """The largest Q(s, a) [P, E] over allowed actions."""
        return allowed(self.q_values(stack.networks["q"](observation)), observation.get("action_mask")).amax(-1)

    def q_values(self, outputs: Tensors) -> Tensor:
        """Q(s, a) of all actions [P, B, A] from the heads' outputs."""
        return self.values.mean(self.atoms(outputs))

    def atoms(self, outputs: Tensors) -> Tensor:
        """The value atoms (scalar, logits or quantiles) of all actions [P, B, A, N] from the heads' outputs."""
        head = "advantage" if self.settings.dueling else "q_values"
        atoms = outputs[head].unflatten(-1, (self.actions, self.values.atoms))
        return dueling(outputs["value"], atoms) if self.settings.dueling else atoms

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Decay epsilon."""
        stack.state["epsilon"] = self.settings.exploration.after(stack.state["epsilon"], steps)

    def loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Temporal-difference loss of a batch, plus the `penalty` of subclasses.

        The online and target networks each draw new noise.
        """
        action, gamma = batch.columns["action"], stack.hyperparameters["gamma"]
        network, target = (networks["q"].with_noise(generator) for networks in (stack.networks, stack.targets))
        outputs, next_outputs = self._outputs_and_next(network, batch)
        with torch.no_grad():
            atoms, target_atoms = self.atoms(outputs), self.atoms(target(batch.next_observation))
            # Double Q-learning: the online network selects the action that the target network evaluates.
            next_q_values = self.values.mean(target_atoms if next_outputs is None else self.atoms(next_outputs))
            next_action = allowed(next_q_values, batch.next_observation.get("action_mask")).max(-1).indices
            next_atoms = of_action(target_atoms, next_action)
            loss, gradient = self.values.loss(of_action(atoms, action), next_atoms, batch.columns, gamma)
            gradient = of_action_gradient(gradient * batch.weight.unsqueeze(-1), action, self.actions)
            penalty = self.penalty(stack, batch, atoms)
            if penalty is not None:
                loss.elements = loss.elements + penalty[0]
                gradient += penalty[1] * batch.weight[..., None, None]
            loss.gradients = self._output_gradients(outputs, gradient)
        return loss

    def penalty(self, stack: Stack, batch: Batch, atoms: Tensor) -> LossAndGradient | None:
        """Extra loss [P, B] and its derivative [P, B, A, N] with respect to the `atoms` of all actions; None: no such.

        For subclasses, such as conservative Q-learning with log sum_a exp Q(s, a) - Q(s, a_taken) (arXiv 2006.04779,
        eq. 4). `functional.value_and_gradient` differentiates a loss by autograd.
        """
        return None

    def _outputs_and_next(self, network: StackedNetwork, batch: Batch) -> tuple[Tensors, Tensors | None]:
        """The heads' outputs and, for double Q-learning, those of the next observation without gradients."""
        if not self.settings.double:
            return network(batch.observation), None
        return network.forward_pair(batch.observation, batch.next_observation)

    def _output_gradients(self, outputs: Tensors, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each head's output with its gradient, from the `gradient` [P, B, A, N] at all actions' atoms."""
        if not self.settings.dueling:
            return [(outputs["q_values"], gradient.flatten(-2))]
        value, advantage = dueling_gradient(gradient)
        return [(outputs["advantage"], advantage.flatten(-2)), (outputs["value"], value)]


def allowed(q_values: Tensor, mask: Tensor | None) -> Tensor:
    """The Q-values [P, B, A], with those of masked actions below all others."""
    return q_values if mask is None else q_values.masked_fill(~mask, FORBIDDEN)
