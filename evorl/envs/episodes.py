"""Episode returns, without bias towards short episodes. Axes: P agents, N environment copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.intp]
Floats = NDArray[np.float64]


class Collected(NamedTuple):
    """Counters of collected experience, each [P]: valid transitions, and sums over episodes.

    `returns` and `lengths` are sums over the `episodes` that count, `ended` is the number of all that ended.
    """

    steps: Floats
    returns: Floats
    episodes: Floats
    ended: Floats
    lengths: Floats


class Recent(NamedTuple):
    """Mean return and mean length of recently ended episodes."""

    episodic_return: float
    episodic_length: float

    @classmethod
    def of(cls, sums: Floats) -> Recent | None:
        """The means, from the number of episodes and the sums of their returns and lengths [3]; None without any."""
        count, total, length = sums
        return cls(float(total / count), float(length / count)) if count else None


class Episodes:
    """Episode statistics of P agents in N environment copies, `num_envs` copies per agent.

    The mean return of the episodes that end within a time window is biased towards short episodes, because long ones
    are cut off at its end. So an episode counts only if it started at least as long ago as the longest duration seen so
    far in any of its agent's episodes, running ones included. All episodes that started by then have ended, whatever
    their length; as an episode's length is unknown when it starts, their mean is the mean over all episodes up to
    O(1/n) (Wald's identity for stopped sums).

    An episode belongs to an agent if that agent acted in it from the start.
    """

    def __init__(self, agents: int, num_envs: int) -> None:
        self._agents = agents
        self._num_envs = num_envs
        self._owners = np.full(agents, -1, dtype=np.int64)
        self.restart()

    def restart(self) -> None:
        """Start new episodes in all copies and clear the statistics."""
        copies = self._agents * self._num_envs
        self._clock = 0
        self._began = np.zeros(copies, dtype=np.int64)
        self._owned = np.ones(copies, dtype=bool)
        self._return = np.zeros(copies)
        self._longest = np.zeros(self._agents, dtype=np.int64)
        self._ended = np.zeros(self._agents)
        # For each step in which episodes ended: time, copies, start times, whether owned by an agent, lengths, returns.
        self._recent: list[
            tuple[int, Places, NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]
        ] = []
        # Owned episodes that ended but do not count yet: agent, start time, length, return.
        self._waiting: tuple[Places, NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]] = (
            np.zeros(0, dtype=np.intp),
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.int64),
            np.zeros(0),
        )
        # Over all episodes that ended since the last call of `recent`: number, sum of returns, sum of lengths.
        self._lately = np.zeros(3)

    def hand_over(self, owners: Sequence[int]) -> None:
        """Assign the copies to agents with these ids [P]; a running episode whose agent changes belongs to neither."""
        new = np.array(owners, dtype=np.int64)
        changed = (self._owners != new) & (self._owners >= 0)
        self._owners = new
        if changed.any():
            self._settle()
            # An episode that starts at this step belongs to the new agent from its first action.
            self._owned &= ~changed.repeat(self._num_envs) | (self._began == self._clock)
            self._longest[changed] = 0
            agent, began, length, total = self._waiting
            stays = ~changed[agent]
            self._waiting = agent[stays], began[stays], length[stays], total[stays]

    def step(
        self,
        reward: NDArray[Any],
        steps: NDArray[np.int64],
        ended: NDArray[np.bool_],
        dropped: NDArray[np.bool_] | None,
    ) -> None:
        """Record the rewards [N] of one step, and the copies whose episode ended or was dropped (never counted).

        `steps` [N] is the length so far of each running episode, without a native environment's reset step.
        """
        self._clock += 1
        self._return += reward
        copies = ended.nonzero()[0]
        if len(copies):
            # Ended episodes are sorted in on request only: short episodes end at almost every step.
            self._recent.append(
                (self._clock, copies, self._began[copies], self._owned[copies], steps[copies], self._return[copies])
            )
            self._begin(copies)
        if dropped is not None:
            self._begin(dropped)

    def pop(self) -> tuple[Floats, Floats, Floats, Floats]:
        """The returns, episodes, ended and lengths of `Collected` since the last call."""
        self._settle()
        # A running episode lasts at least one more step.
        running = np.where(self._owned, self._clock - self._began + 1, 0).reshape(self._agents, -1)
        self._longest = np.maximum(self._longest, running.max(1))
        sums, episodes, lengths = np.zeros((3, self._agents))
        ended, self._ended = self._ended, np.zeros(self._agents)
        agent, began, length, total = self._waiting
        counts = began <= self._clock - self._longest[agent]
        np.add.at(sums, agent[counts], total[counts])
        np.add.at(episodes, agent[counts], 1)
        np.add.at(lengths, agent[counts], length[counts])
        self._waiting = agent[~counts], began[~counts], length[~counts], total[~counts]
        return sums, episodes, ended, lengths

    def recent(self) -> Recent | None:
        """The means over all episodes that ended since the last call, of any agent, or None if none did.

        These are available earlier than those of `pop`, but biased towards short episodes.
        """
        self._settle()
        sums, self._lately = self._lately, np.zeros(3)
        return Recent.of(sums)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Arrays by name; `waiting` is [4, episodes].

        The sums for `recent` are left out: they depend on when it was last called, which the clock decides.
        """
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
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load the output of `state_dict`, of checked shapes and dtypes."""
        agent, began, length, total = state["waiting"]
        self._clock, self._began = 0, -state["ages"]
        self._owners, self._owned = state["owners"].copy(), state["owned"].copy()
        self._return, self._longest = state["returns"].copy(), state["longest"].copy()
        self._ended, self._lately, self._recent = state["ended"].copy(), np.zeros(3), []
        self._waiting = agent.astype(np.intp), began.astype(np.int64), length.astype(np.int64), total.copy()

    def _settle(self) -> None:
        """Move recently ended episodes into the counters and the waiting list."""
        if not self._recent:
            return
        clocks, *columns = zip(*self._recent, strict=True)
        copies, began, owned, length, total = (np.concatenate(column) for column in columns)
        end = np.repeat(clocks, [len(copies) for copies in columns[0]])
        agent = copies // self._num_envs
        self._ended += np.bincount(agent, minlength=self._agents)
        np.maximum.at(self._longest, agent[owned], (end - began)[owned])
        self._lately += len(total), total.sum(), length.sum()
        new = agent[owned], began[owned], length[owned], total[owned]
        agent, began, length, total = (np.concatenate(pair) for pair in zip(self._waiting, new, strict=True))
        self._waiting = agent, began, length, total
        self._recent = []

    def _begin(self, copies: Places | NDArray[np.bool_]) -> None:
        self._began[copies] = self._clock
        self._owned[copies] = True
        self._return[copies] = 0.0
