"""The protocol of trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evorl.runs.trackers.record import Points, Record

Row = Mapping[str, Any]


class Tracker(Protocol):
    """A destination of a run's metrics."""

    def log(self, record: Record) -> None:
        """Add a generation; generations and steps only grow."""

    def log_within(self, step: int, points: Points) -> None:
        """Add points of the population from within a generation, about `step`."""

    def log_video(self, step: int, path: Path) -> None:
        """Add the film of a new best agent, which was found at `step`."""

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Note how the run ended and who came from whom, and close."""
