"""The pace of learning from experience, and what an experience needs of a policy and a sampler.

Axes: R ranks, U updates, P agents, E environments, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.moments import Moments
from evorl.types import Agent, Observation, Tensors, UpdateResult

Gather = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Every rank's numbers [R, ...] from this rank's [...]; of this rank alone where agents are not replicated."""


@dataclass(frozen=True)
class Pace:
    """Amount and frequency of a new agent's learning: `updates` with each `steps` of its environment steps.

    A batch has `batch` transitions. Both steps and transitions are those of all ranks that hold the agent.
    """

    batch: int
    updates: float
    steps: float


class Population(Protocol):
    """The policy, as far as its experience needs it."""

    agents: list[Agent]

    def acted(self, steps: NDArray[np.float64]) -> None:
        """Note `steps` [P] further transitions of each agent, over all ranks that hold it; all of them say the same."""

    def value(self, observation: Observation, state: Tensor | None) -> Tensor:
        """Return what the agents expect [P, E] from observations [P, E, ...], in recurrent state [P, E, K, N]."""

    def update_observation_stats(self, part: str, moments: Moments) -> None:
        """Add to the statistics by which each agent normalises a part of what it sees."""


@dataclass(frozen=True)
class Agreement:
    """Hold what all ranks with the same agents know alike after a vector step.

    `sizes` [R] are the transitions that each rank has, `steps` [P] those that each agent made in this generation over
    all ranks, and `reports` [R, K] what each rank's sampler reported.
    """

    sizes: NDArray[np.int64]
    steps: NDArray[np.float64]
    reports: NDArray[np.float64]


class Draws(NamedTuple):
    """The draws of U updates, each [U, P, B]: `slots`, their `weight` in the loss, and their `share` of the batch.

    Weights are shares times importance weights. Without importance weights `share` is None, as both are the same.
    """

    slots: Tensor
    weight: Tensor
    share: Tensor | None


class Sampler(Protocol):
    """Chooses what each update learns from. It draws from the union of the parts of all ranks that hold the agents."""

    def begin(self, agents: Sequence[Agent], generation: int, ranks: int) -> None:
        """Start a generation of these agents, which so many ranks hold."""

    def insert(self, errors: NDArray[np.float64]) -> None:
        """Take the errors [T, N] of the T rows that were written last, which somebody has computed who acted."""

    def report(self) -> NDArray[np.float64]:
        """Return what all ranks must know of this one's part [K] before the next draw."""

    def agree(self, known: Agreement) -> None:
        """Take note of what all ranks know; every vector step has an agreement, whether anything is drawn or not."""

    def draw(self, updates: int) -> Draws:
        """Return the draws of so many updates."""

    def observe(self, update: int, result: UpdateResult) -> None:
        """Take note of what became of an update of the last draw."""

    def state(self) -> Tensors:
        """Return what a checkpoint keeps beside the storage, under names that begin with `priorities`."""

    def restore(self, tensors: Tensors, numbers: Mapping[str, int]) -> None:
        """Take over what `state` gave beside a storage of these numbers, which has been restored.

        Raises UserError for what it could not have given.
        """
