"""The pace of learning from experience, and what an experience needs of the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.moments import Moments
from evorl.types import Agent, Observation

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
