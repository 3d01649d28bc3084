"""The protocol of trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from evorl.runs.trackers.history import Points

Row = Mapping[str, Any]


class Tracker(Protocol):
    """A destination of a run's metrics."""

    def log(self, generation: int, step: int, scalars: Points) -> None:
        """Add a generation's points at `step`, the environment steps of all agents; both only grow."""

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Note how the run ended and who came from whom, and close."""
