"""Intermediate tracker points within a generation, which may take minutes."""

from __future__ import annotations

import time
from typing import Protocol

from evorl.envs.episodes import Recent
from evorl.tracking.tracker import Points


class Watched(Protocol):
    """Collects experience: a rank's environments, or its actors."""

    def recent(self) -> Recent | None:
        """Return means over the episodes that ended since the last call, or None if none did."""


class Within:
    """Produces points at most every `interval` seconds: the speed, and the recent episodes of this rank."""

    def __init__(self, interval: float, step: int) -> None:
        self._interval = interval
        self.begin(step)

    def begin(self, step: int) -> None:
        """Start a generation at `step`, the environment steps of all agents so far."""
        self._step = self._first = step
        self._began = self._said = 0.0

    def advance(self, steps: int, watched: Watched) -> tuple[int, Points] | None:
        """Count `steps` more of all agents; return the step and its points if the interval has passed, else None."""
        now = time.perf_counter()
        if not self._began:
            # Start the clock here, not in `begin`: evolution and a checkpoint come before the first step.
            self._began = self._said = now
            self._first = self._step + steps
        self._step += steps
        if now - self._said < self._interval:
            return None
        self._said = now
        points = {"charts/SPS": (self._step - self._first) / (now - self._began)}
        recent = watched.recent()
        points |= {f"charts/{name}": value for name, value in recent._asdict().items()} if recent else {}
        return self._step, points
