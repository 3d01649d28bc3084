"""Metrics of a rank's actors: rates, staleness, restarts and returns. Axes: P agents, A actors, R ranks."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from evorl.distributed import Placement
from evorl.envs.episodes import Collected, Recent

Floats = NDArray[np.float64]


class Figures:
    """Actor metrics of one rank, summed since they were last read."""

    def __init__(self, actors: int, agents: int) -> None:
        self._counts = np.zeros((len(Collected._fields), agents))
        # Episodes since the last call of `recent`: the sum of returns, their number, the sum of lengths.
        self._lately = np.zeros(3)
        self._steps = np.zeros(actors)
        self.restarts = 0
        """Actors replaced since the last call of `pop`."""
        self._staleness: list[int] = []
        self._depths: list[int] = []
        self._stale = self._old = 0
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start the clock for step rates."""
        self._began = time.perf_counter()

    def received(self, actor: int, counts: Floats, staleness: int, waiting: int) -> None:
        """Record a slot's counters [C, P], its staleness in updates, and how many other messages are waiting."""
        self._counts += counts
        self._lately += counts[[1, 2, 4]].sum(1)
        self._steps[actor] += counts[0].sum()
        self._staleness.append(staleness)
        self._depths.append(waiting)

    def discarded(self, stale: bool) -> None:
        """Count a discarded slot: too `stale`, or else of an earlier generation."""
        self._stale += stale
        self._old += not stale

    def pop_collected(self) -> Collected:
        """Return the counters of the received slots since the last call."""
        counts, self._counts = self._counts, np.zeros_like(self._counts)
        return Collected(*counts)

    def recent(self) -> Recent | None:
        """Return the mean return and length of episodes since the last call, or None without any."""
        total, count, length = self._lately
        self._lately = np.zeros(3)
        return Recent(float(total / count), float(length / count)) if count else None

    def pop(self, placement: Placement) -> dict[str, float]:
        """Return all other metrics over all ranks and reset them; actors are numbered rank after rank."""
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
