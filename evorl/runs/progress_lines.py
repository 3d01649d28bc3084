"""Progress lines during a generation, for logs and other outputs without a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable

from evorl.system.console import compact, duration

EVERY = 30.0
"""Seconds between two lines."""
FIRST_LOOK = 20.0
"""Seconds after which the length of the first generation is estimated."""
LONG = 300.0
"""Seconds above which the estimate is printed."""


class ProgressLines:
    """Says how far a generation is, how fast, and how long it will take. Steps are those of each agent.

    The speed is measured since the last line. If a run's first generation will be long, one line says how to shorten
    it; this is the only line if `estimates_only`, as beside a progress bar.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        agents: int,
        *,
        estimates_only: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._say = say
        self._agents = agents
        self._estimates_only = estimates_only
        self._clock = clock
        self._generation = self._total = self._done = self._before = 0
        self._since = 0.0
        self._looks = self._spoke = False

    def begin(self, generation: int, done: int, total: int) -> None:
        """Begin a generation of `total` steps, or go on after `done` of them."""
        self._generation, self._done, self._total, self._before = generation, done, total, done
        self._since = self._clock()
        self._looks, self._spoke = generation == 1 and done == 0, False

    def advance(self, steps: int, recent: str) -> None:
        """Count steps, and say a line if it is due; `recent` describes the latest episodes."""
        self._done += steps
        seconds = self._clock() - self._since
        if self._looks and seconds >= FIRST_LOOK:
            self._looks = False
            self._estimate(self._done / seconds)
        if seconds < EVERY or self._estimates_only:
            return
        rate = (self._done - self._before) / seconds
        parts = [
            f"gen {self._generation}",
            f"{compact(self._done)} of {compact(self._total)} steps ({self._done / self._total:.0%})",
            f"{rate * self._agents:,.0f} steps/s of all agents",
            f"{duration(max(0, self._total - self._done) / rate)} left of the generation",
            *([recent] if recent else []),
        ]
        self._say(" | ".join(parts))
        self._since, self._before, self._spoke = self._clock(), self._done, True

    def evaluate(self) -> None:
        """Say that evaluation begins, if training has taken long enough for a line."""
        if self._spoke:
            self._say(f"gen {self._generation} | evaluation")

    def _estimate(self, rate: float) -> None:
        if self._total / rate <= LONG:
            return
        fewer = float(f"{rate * LONG:.1g}")
        self._say(
            f"the first generation takes about {duration(self._total / rate)} at {rate * self._agents:,.0f} steps/s of "
            f"all agents; evolution.steps={max(1, round(fewer))} would shorten it to about {duration(fewer / rate)}"
        )
