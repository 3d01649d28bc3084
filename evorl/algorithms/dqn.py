"""Deep Q-learning (Mnih et al. 2015) with double Q-learning (arXiv 1509.06461) and soft target updates (1509.02971).

Axes: P agents, E environments, B batch, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import gymnasium as gym
import torch
from pydantic import Field
from torch import Tensor

from evorl.algorithms.exploration import random_choices
from evorl.algorithms.losses import REGRESSION_LOSSES
from evorl.algorithms.objective import hyperparameter
from evorl.algorithms.replayed import Rate, Replayed, ReplayedSettings
from evorl.algorithms.returns import bootstrapped_return, double_q_value
from evorl.config import Config
from evorl.config.fields import Fraction, HyperparameterRange, Section
from evorl.envs.spec import EnvSpec
from evorl.networks.distributions import FORBIDDEN
from evorl.networks.spec import NetworkSpec, Polyak
from evorl.networks.stacked import Stack, StackedNetwork
from evorl.types import Batch, Head, Loss, Observation, RecurrentInput, Streams, Tensors, UserError


class Exploration(Section):
    """Epsilon-greedy: the probability of a random action falls from `start` to `end`."""

    start: Fraction = 1.0
    end: Fraction = 0.05
    decay: Annotated[float, Field(gt=0, le=1)] = 0.9995
    """The factor for each step of each of an agent's environments, over all ranks."""


class DQNSettings(ReplayedSettings):
    name: Literal["dqn"] = "dqn"
    double: bool = True
    dueling: bool = False
    """Learn the value of states and the advantages of actions apart (arXiv 1511.06581)."""
    learning_rate: Rate = 2e-3
    learn_step: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8
    tau: Rate = 2e-2
    loss: Literal["mse", "huber"] = "huber"
    exploration: Exploration = Exploration()

    layer_norm: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=2e-4, max=8e-3),
        "batch_size": HyperparameterRange(min=128, max=512),
        "learn_step": HyperparameterRange(min=4, max=16),
    }


class DQN(Replayed):
    """A stack of DQN agents: their actions and their loss."""

    metrics = ("td_error", "q_values")
    stored_action = (), torch.int64

    def __init__(self, config: Config[DQNSettings], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        if not isinstance(interface.action, gym.spaces.Discrete):
            raise UserError(
                f"algorithm.name: dqn needs discrete actions; {interface.environment} has {interface.action}"
            )
        self.actions = int(interface.action.n)
        heads = [Head("q_values", self.actions)]
        if self.settings.dueling:
            heads = [Head("advantage", self.actions), Head("value", 1)]
        # Dueling networks part before the last hidden layer.
        streams: Streams = "last" if self.settings.dueling else "shared"
        self.networks: Mapping[str, NetworkSpec] = {"q": self.network(interface.parts, heads, streams, Polyak("tau"))}
        self.objectives = [self.objective("q", self.loss, hyperparameter("learning_rate"))]

    def initial_state(self) -> dict[str, float]:
        """Return the state that acting changes: the exploration rate."""
        return {"epsilon": self.settings.exploration.start}

    def act(
        self,
        stack: Stack,
        observation: Observation,
        recurrent: RecurrentInput | None,
        generator: torch.Generator,
        deterministic: bool,
    ) -> tuple[Tensor, Tensors, Tensor | None]:
        """Return epsilon-greedy actions [P, E] for observations [P, E, ...], or greedy ones."""
        mask = observation.get("action_mask")
        greedy = allowed(self.q_values(stack.networks["q"](observation)), mask).argmax(-1)
        if deterministic:
            return greedy, {}, None
        explores = torch.rand(greedy.shape, generator=generator, device=greedy.device)
        random = random_choices(self.actions, greedy.shape, mask, generator)
        return torch.where(explores < stack.state["epsilon"].unsqueeze(1), random, greedy), {}, None

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """Return the value [P, E] of the best action for observations [P, E, ...]."""
        return allowed(self.q_values(stack.networks["q"](observation)), observation.get("action_mask")).amax(-1)

    def q_values(self, outputs: Tensors) -> Tensor:
        """Return the values of all actions [P, B, A] from what the heads put out."""
        if not self.settings.dueling:
            return outputs["q_values"]
        advantage = outputs["advantage"]
        return outputs["value"] + advantage - advantage.mean(-1, keepdim=True)

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Decay exploration by `steps` further transitions of each agent [P] or of every one, over all ranks."""
        exploration = self.settings.exploration
        stack.state["epsilon"].mul_(exploration.decay**steps).clamp_(min=exploration.end)

    def loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Return the temporal-difference loss of a batch."""
        columns, following = batch.columns, batch.next_observation
        q, next_q = self._q_and_next_q(stack.networks["q"], batch)
        with torch.no_grad():
            mask = following.get("action_mask")
            target_next = allowed(self.q_values(stack.targets["q"](following)), mask)
            next_value = target_next.amax(-1) if next_q is None else double_q_value(allowed(next_q, mask), target_next)
            target = bootstrapped_return(columns, stack.hyperparameters["gamma"], next_value)
        chosen = q.gather(-1, columns["action"].unsqueeze(-1)).squeeze(-1)
        values = chosen.detach()
        errors = target - values
        elements = REGRESSION_LOSSES[self.settings.loss](chosen, target)
        return Loss(elements, lambda: {"td_error": errors.abs(), "q_values": values}, errors)

    def _q_and_next_q(self, network: StackedNetwork, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the values [P, B, A] of all actions, and without gradients those after the step where needed."""
        if not self.settings.double:
            return self.q_values(network(batch.observation)), None
        outputs, following = network.forward_pair(batch.observation, batch.next_observation)
        return self.q_values(outputs), self.q_values(following)


def allowed(q_values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values [P, B, A] with those of forbidden actions below all others."""
    return q_values if mask is None else q_values.masked_fill(~mask, FORBIDDEN)
