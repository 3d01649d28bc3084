"""Update-to-data ratio, and the interfaces of policies and samplers towards an experience.

Axes: R ranks, U updates, P agents, E environments, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.statistics import Moments
from evorl.types import Agent, Observation, Tensors, UpdateResult


@dataclass(frozen=True)
class Pace:
    """The update-to-data ratio of a new agent: `updates` updates for every `steps` of its environment steps.

    A batch has `batch` transitions. Steps and transitions are counted over all ranks that hold the agent.
    """

    batch: int
    updates: float
    steps: float


class Population(Protocol):
    """The policy, as its experience sees it."""

    agents: list[Agent]

    def acted(self, steps: NDArray[np.float64]) -> None:
        """Add `steps` [P] transitions of each agent, summed over its ranks; all of these ranks pass the same values."""

    def value(self, observation: Observation, state: Tensor | None) -> Tensor:
        """Return state values V(s) [P, E] of observations [P, E, ...] with recurrent state [P, E, K, N]."""

    def update_observation_stats(self, part: str, moments: Moments) -> None:
        """Merge `moments` into each agent's normalisation statistics of an observation part."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks with the same agents know after the exchange of a vector step.

    `sizes` [R] are each rank's transitions, `steps` [P] each agent's steps in this generation over all ranks, and
    `reports` [R, K] the samplers' reports.
    """

    sizes: NDArray[np.int64]
    steps: NDArray[np.float64]
    reports: NDArray[np.float64]


class Draws(NamedTuple):
    """Draws for U updates, each [U, P, B]: `slots`, their `weight` in the loss, and their `share` of the batch.

    Weights are shares times importance weights. Without importance weights both are equal and `share` is None.
    """

    slots: Tensor
    weight: Tensor
    share: Tensor | None


class Sampler(Protocol):
    """Chooses the transitions of each update, from the union of the replays of all ranks that hold the agents."""

    def begin(self, agents: Sequence[Agent], generation: int, ranks: int) -> None:
        """Start a generation with these agents, held by `ranks` ranks."""

    def insert(self, errors: NDArray[np.float64]) -> None:
        """Take actor-computed errors [T, N] of the T newest rows."""

    def report(self) -> NDArray[np.float64]:
        """Return this rank's numbers [K] that all ranks need before the next draw."""

    def agree(self, known: Agreement) -> None:
        """Take the result of the exchange; it happens every vector step, even if nothing is drawn."""

    def draw(self, updates: int) -> Draws:
        """Draw slots for `updates` updates."""

    def observe(self, update: int, result: UpdateResult) -> None:
        """Take the result of an update of the last draw."""

    def generators(self) -> Tensors:
        """Return the states of the random generators that this generation draws with, as bytes by name."""

    def resume(self, generators: Tensors) -> None:
        """Load the output of `generators`. Raises UserError for an invalid one."""

    def state(self) -> Tensors:
        """Return the sampler's tensors for a checkpoint, under names that begin with `priorities`."""

    def restore(self, tensors: Tensors, numbers: Mapping[str, int]) -> None:
        """Restore from `state`, after a storage with these numbers has been restored.

        Raises UserError for an invalid state.
        """
