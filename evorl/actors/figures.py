"""What a rank counts of its actors, beside what they learn. Axes: P agents, A actors, R ranks."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from evorl.distributed import Placement
from evorl.envs.episodes import Recent, Returns
from evorl.replay.segment import COUNTS

Floats = NDArray[np.float64]


class Figures:
    """Sums since the last call, of one rank."""

    def __init__(self, actors: int, agents: int) -> None:
        self._counts = np.zeros((len(COUNTS), agents))
        # Of the episodes that were counted since `recent` was asked: the sums of returns, how many, of lengths.
        self._lately = np.zeros(3)
        self._steps = np.zeros(actors)
        self.restarts = 0
        """Actors that were replaced."""
        self._staleness: list[int] = []
        self._depths: list[int] = []
        self._stale = self._old = 0
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin to measure rates."""
        self._began = time.perf_counter()

    def received(self, actor: int, counts: Floats, staleness: int, waiting: int) -> None:
        """Note what an actor counted [C, P], and how far its parameters were behind, and how many others wait."""
        self._counts += counts
        self._lately += counts[[1, 2, 4]].sum(1)
        self._steps[actor] += counts[0].sum()
        self._staleness.append(staleness)
        self._depths.append(waiting)

    def discarded(self, stale: bool) -> None:
        """Note that something was discarded because it was `stale`, or else of an earlier generation."""
        self._stale += stale
        self._old += not stale

    def pop_steps(self) -> Floats:
        """Return the transitions [P]."""
        steps: Floats = self._counts[0].copy()
        self._counts[0] = 0.0
        return steps

    def pop_returns(self) -> Returns:
        """Return the returns."""
        sums, episodes, ended, lengths = self._counts[1:].copy()
        self._counts[1:] = 0.0
        return Returns(sums, episodes, ended, lengths)

    def recent(self) -> Recent | None:
        """Return means over the episodes that were counted since the last call, and none where none were."""
        total, count, length = self._lately
        self._lately = np.zeros(3)
        return Recent(float(total / count), float(length / count)) if count else None

    def pop(self, placement: Placement) -> dict[str, float]:
        """Return everything else, over all ranks, whose actors are numbered rank after rank."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        sums = [len(self._staleness), sum(self._staleness), sum(self._depths), self.restarts, self._stale, self._old]
        most = max(self._staleness, default=0)
        own = np.array([*sums, most, *(self._steps / seconds)], dtype=np.float64)
        everyones = placement.ranks.gather(own, "the other ranks' actors")
        received, staleness, depth, restarts, stale, old = everyones[:, : len(sums)].sum(0).tolist()
        rates = everyones[:, len(sums) + 1 :].flatten()
        self._steps[:] = 0.0
        self._staleness, self._depths, self.restarts, self._stale, self._old = [], [], 0, 0, 0
        return {
            "rollouts": received,
            "staleness": staleness / max(received, 1),
            "max_staleness": float(everyones[:, len(sums)].max()),
            "queue_depth": depth / max(received, 1),
            "restarts": restarts,
            "discarded_stale": stale,
            "discarded_old": old,
            **{f"steps_per_second/{actor}": float(rate) for actor, rate in enumerate(rates)},
        }
