"""Returns of episodes, counted so that short episodes weigh no more than long ones. Axes: P agents, N copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.types import UserError

Places = NDArray[np.intp]


class Returns(NamedTuple):
    """Sums [P] of the returns of the episodes that count, how many those are [P], and how many ended in all [P].

    `lengths` [P] are sums of the steps of those that count, with the step that a native environment spends on a reset.
    """

    sums: NDArray[np.float64]
    episodes: NDArray[np.float64]
    ended: NDArray[np.float64]
    lengths: NDArray[np.float64]


class Recent(NamedTuple):
    """The mean return and the mean length of episodes that ended lately."""

    episodic_return: float
    episodic_length: float


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
        self._owners = np.full(agents, -1, dtype=np.int64)
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
        # Of each step in which episodes ended: when, in which copies, when they began, whether an agent's, the returns.
        self._recent: list[tuple[int, Places, NDArray[np.int64], NDArray[np.bool_], NDArray[np.float64]]] = []
        # Of the agents' own episodes that ended and do not count yet: whose, when begun, their lengths, the returns.
        self._waiting: tuple[Places, NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]] = (
            np.zeros(0, dtype=np.intp),
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.int64),
            np.zeros(0),
        )
        # Of all episodes that ended since `recent` was asked: how many, the sum of their returns and of their lengths.
        self._lately = np.zeros(3)

    def hand_over(self, owners: Sequence[int]) -> None:
        """Let the agents with these ids [P] act from now on; an episode whose agent changes belongs to neither."""
        new = np.array(owners, dtype=np.int64)
        changed = (self._owners != new) & (self._owners >= 0)
        self._owners = new
        if changed.any():
            self._settle()
            # What begins with this step is the new agent's from its beginning.
            self._owned &= ~changed.repeat(self._num_envs) | (self._began == self._clock)
            self._longest[changed] = 0
            agent, began, length, total = self._waiting
            kept = ~changed[agent]
            self._waiting = agent[kept], began[kept], length[kept], total[kept]

    def step(self, reward: NDArray[Any], ended: NDArray[np.bool_], dropped: NDArray[np.bool_] | None) -> None:
        """Note the rewards [N] of one step, and in which copies an episode ended, or was dropped and never counts."""
        self._clock += 1
        self._return += reward
        copies = ended.nonzero()[0]
        if len(copies):
            # What ended is only sorted in when it is asked for: short episodes end in almost every step.
            self._recent.append((self._clock, copies, self._began[copies], self._owned[copies], self._return[copies]))
            self._begin(copies)
        if dropped is not None:
            self._begin(dropped)

    def pop(self) -> Returns:
        """Return what counts now and did not count before, and how many episodes ended since the last call."""
        self._settle()
        ages = np.where(self._owned, self._clock - self._began, 0).reshape(self._agents, -1)
        self._longest = np.maximum(self._longest, ages.max(1))
        sums, episodes, lengths = np.zeros((3, self._agents))
        ended, self._ended = self._ended, np.zeros(self._agents)
        agent, began, length, total = self._waiting
        counts = began <= self._clock - self._longest[agent]
        np.add.at(sums, agent[counts], total[counts])
        np.add.at(episodes, agent[counts], 1)
        np.add.at(lengths, agent[counts], length[counts])
        self._waiting = agent[~counts], began[~counts], length[~counts], total[~counts]
        return Returns(sums, episodes, ended, lengths)

    def recent(self) -> Recent | None:
        """Return the means over all episodes that ended since the last call, whoever's, and none where none did.

        They come sooner than those of `pop`, and favour short episodes.
        """
        self._settle()
        count, total, length = self._lately
        self._lately = np.zeros(3)
        return Recent(float(total / count), float(length / count)) if count else None

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a process needs to go on counting, as arrays by name; `waiting` is [4, episodes]."""
        self._settle()
        return {
            "owners": self._owners,
            "ages": self._clock - self._began,
            "owned": self._owned,
            "returns": self._return,
            "longest": self._longest,
            "ended": self._ended,
            "waiting": np.stack([values.astype(np.float64) for values in self._waiting])
            - np.array([[0.0], [self._clock], [0.0], [0.0]]),
            "lately": self._lately,
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `state` gave, in checked shapes and types. Raises UserError for what it cannot have given."""
        agent, began, length, total = state["waiting"]
        if not (np.isin(agent, range(self._agents)).all() and np.isfinite(state["waiting"]).all()):
            raise UserError("an episode that ended is of no agent")
        self._clock, self._began = 0, -state["ages"]
        self._owners, self._owned = state["owners"].copy(), state["owned"].copy()
        self._return, self._longest = state["returns"].copy(), state["longest"].copy()
        self._ended, self._lately, self._recent = state["ended"].copy(), state["lately"].copy(), []
        self._waiting = agent.astype(np.intp), began.astype(np.int64), length.astype(np.int64), total.copy()

    def drop(self, copies: NDArray[np.bool_]) -> None:
        """Let new episodes begin in these copies [N] in place of those that ran, which never count."""
        self._begin(copies)

    def _settle(self) -> None:
        """Sort in the episodes that ended since the last call."""
        if not self._recent:
            return
        clocks, *columns = zip(*self._recent, strict=True)
        copies, began, owned, total = (np.concatenate(column) for column in columns)
        end = np.repeat(clocks, [len(each) for each in columns[0]])
        agent = copies // self._num_envs
        self._ended += np.bincount(agent, minlength=self._agents)
        np.maximum.at(self._longest, agent[owned], (end - began)[owned])
        self._lately += len(total), total.sum(), (end - began).sum()
        new = agent[owned], began[owned], (end - began)[owned], total[owned]
        agent, began, length, total = (np.concatenate(pair) for pair in zip(self._waiting, new, strict=True))
        self._waiting = agent, began, length, total
        self._recent = []

    def _begin(self, copies: Places | NDArray[np.bool_]) -> None:
        self._began[copies] = self._clock
        self._owned[copies] = True
        self._return[copies] = 0.0
