"""Returns of episodes, counted so that short episodes weigh no more than long ones. Axes: P agents, N copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Returns(NamedTuple):
    """Sums [P] of the returns of the episodes that count, how many those are [P], and how many ended in all [P]."""

    sums: NDArray[np.float64]
    episodes: NDArray[np.float64]
    ended: NDArray[np.float64]


class Episodes:
    """The episodes of P agents in N copies of an environment, `num_envs` copies for each agent.

    The mean return of those that ended within a stretch of time is that of too short ones: long ones are cut off at its
    end. So an episode counts only if it began at least as long ago as any of its agent's episodes has lasted so far.
    All that began until then have ended, whatever their length, and as nobody can foresee an episode's length when it
    begins, their mean is that of all up to O(1/n) (Wald's identity for stopped sums).

    An episode is its agent's if that agent has acted in it from its beginning.
    """

    def __init__(self, agents: int, num_envs: int) -> None:
        self._agents = agents
        self._num_envs = num_envs
        self._owners: tuple[int, ...] = ()
        self.restart()

    def restart(self) -> None:
        """Let new episodes begin in all copies."""
        copies = self._agents * self._num_envs
        self._clock = 0
        self._began = np.zeros(copies, dtype=np.int64)
        self._owned = np.ones(copies, dtype=bool)
        self._return = np.zeros(copies)
        self._longest = np.zeros(self._agents, dtype=np.int64)
        self._ended = np.zeros(self._agents)
        # Of each step in which some of the agents' own episodes ended: whose, when they began, their returns.
        self._waiting: list[tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.float64]]] = []

    def hand_over(self, owners: Sequence[int]) -> None:
        """Let the agents with these ids [P] act from now on; an episode whose agent changes belongs to neither."""
        changed = np.array([old != new for old, new in zip(self._owners, owners, strict=True)] if self._owners else [])
        self._owners = tuple(owners)
        if changed.any():
            # What begins with this step is the new agent's from its beginning.
            self._owned &= ~changed.repeat(self._num_envs) | (self._began == self._clock)
            self._longest[changed] = 0
            kept = ((agent, began, total, ~changed[agent]) for agent, began, total in self._waiting)
            self._waiting = [(agent[own], began[own], total[own]) for agent, began, total, own in kept]

    def step(self, reward: NDArray[np.float64], ended: NDArray[np.bool_], dropped: NDArray[np.bool_] | None) -> None:
        """Note the rewards [N] of one step, and in which copies an episode ended, or was dropped and never counts."""
        self._clock += 1
        self._return += reward
        if ended.any():
            self._note(np.flatnonzero(ended & self._owned))
            self._ended += ended.reshape(self._agents, -1).sum(1)
            self._begin(ended)
        if dropped is not None:
            self._begin(dropped)

    def pop(self) -> Returns:
        """Return what counts now and did not count before, and how many episodes ended since the last call."""
        ages = np.where(self._owned, self._clock - self._began, 0).reshape(self._agents, -1)
        self._longest = np.maximum(self._longest, ages.max(1))
        sums, episodes, ended = np.zeros(self._agents), np.zeros(self._agents), self._ended
        self._ended = np.zeros(self._agents)
        if self._waiting:
            agent, began, total = (np.concatenate(column) for column in zip(*self._waiting, strict=True))
            counts = began <= self._clock - self._longest[agent]
            np.add.at(sums, agent[counts], total[counts])
            np.add.at(episodes, agent[counts], 1)
            self._waiting = [(agent[~counts], began[~counts], total[~counts])]
        return Returns(sums, episodes, ended)

    def _note(self, copies: NDArray[np.intp]) -> None:
        agent = copies // self._num_envs
        np.maximum.at(self._longest, agent, self._clock - self._began[copies])
        self._waiting.append((agent, self._began[copies], self._return[copies]))

    def _begin(self, copies: NDArray[np.bool_]) -> None:
        self._began[copies] = self._clock
        self._owned[copies] = True
        self._return[copies] = 0.0
