"""The interface of algorithms, and the objectives that an algorithm minimises.

Axes: P agents, E environments, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from evorl.config.fields import AlgorithmSettings
from evorl.distributed import Placement
from evorl.envs.spaces import EnvSpec
from evorl.networks.stack import NetworkSpec, Stack
from evorl.replay import Experience, Pace
from evorl.system.console import Stopwatch
from evorl.types import Batch, Loss, Observation, RecurrentInput, Tensors

PerAgent = Callable[[Stack], Tensor]
"""Maps a stack to one number per agent [P]."""


@dataclass(frozen=True)
class Objective:
    """The loss and optimiser settings of one network in an update.

    `loss` may draw from the generator. `learning_rate` includes the learning rate schedule. `max_grad_norm` clips each
    agent's gradient by its own norm. Metrics of the loss are computed in every `report_every`-th of its updates.

    An agent's network is updated in the first of every `every` updates of that agent (TD3's policy delay, arXiv
    1802.09477). The optimiser steps of the first objective's network count the agent's updates; its `every` is 1.
    """

    network: str
    loss: Callable[[Stack, Batch, torch.Generator], Loss]
    learning_rate: PerAgent
    every: int = 1
    max_grad_norm: PerAgent | None = None
    report_every: int = 1


def hyperparameter(name: str) -> PerAgent:
    """Return the function that reads a hyperparameter [P] of a stack."""
    return lambda stack: stack.hyperparameters[name]


class Algorithm(Protocol):
    """How stacks of agents act, what they store, and their losses. It holds no state of any agent."""

    @property
    def settings(self) -> AlgorithmSettings:
        """Return the algorithm's section of the configuration."""

    @property
    def interface(self) -> EnvSpec:
        """Return the environment's observation and action spaces."""

    @property
    def networks(self) -> Mapping[str, NetworkSpec]:
        """Return each agent's networks by name."""

    @property
    def objectives(self) -> Sequence[Objective]:
        """Return the objectives of an update, in the order in which they are minimised."""

    @property
    def metrics(self) -> Sequence[str]:
        """Return the names of the metrics that the losses report."""

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Return the shape [K, N] of exploration noise that carries over from step to step, or (0, 0) without any.

        There is one such noise per environment. `act` carries it as the recurrent state, which is zero where episodes
        start.
        """

    def initial_state(self) -> dict[str, float]:
        """Return a new agent's acting state by name: non-negative numbers that acting changes, such as epsilon."""

    def actor_state(self, index: int, count: int) -> Mapping[str, float]:
        """Return the acting states in which actor `index` of `count`, over all ranks, differs from the learner."""

    def pace(self, copies: int) -> Pace:
        """Return the batch size and update-to-data ratio of a new agent that `copies` ranks hold.

        Raises UserError if they cannot share its batches.
        """

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        """Return this rank's replay or rollouts.

        `always_valid` says that every step of every environment is a transition.
        """

    def act(
        self,
        stack: Stack,
        observation: Observation,
        recurrent: RecurrentInput | None,
        generator: torch.Generator,
        deterministic: bool,
    ) -> tuple[Tensor, Tensors, Tensor | None]:
        """Return actions [P, E, ...] for observations [P, E, ...], extras to store, and the next recurrent state."""

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """Return state values V(s) [P, E] of observations [P, E, ...]."""

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Count `steps` further transitions over all ranks, given for each agent [P] or as one number for all."""
