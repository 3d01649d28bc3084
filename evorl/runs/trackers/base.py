"""The interface of experiment trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evorl.runs.trackers.record import Points, Record

Row = Mapping[str, Any]


class Tracker(Protocol):
    """An experiment tracker that receives a run's metrics."""

    def log(self, record: Record) -> None:
        """Log a generation; generations and steps are increasing."""

    def log_within(self, step: int, points: Points) -> None:
        """Log population metrics from within a generation, at approximately `step`."""

    def log_video(self, step: int, path: Path) -> None:
        """Log the video of a new elite, found at `step`."""

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Log the summary and the lineage, and close the tracker."""
