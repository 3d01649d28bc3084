"""Where curves go, and the registry of trackers that a configuration can name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evorl.config import AnyConfig
from evorl.tracking.tensorboard import TensorBoard
from evorl.tracking.wandb import WeightsAndBiases
from evorl.types import EvorlWarning

Row = Mapping[str, Any]


class Tracker(Protocol):
    """Somewhere that a run's numbers go."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add points at `step`, the environment steps of all agents, which only grows."""

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Note how the run ended and who came from whom, and close."""


TRACKERS: Mapping[str, Callable[[AnyConfig, Path], Tracker]] = {
    "wandb": WeightsAndBiases,
    "tensorboard": TensorBoard,
}
"""From the configuration and the run's directory to the tracker."""


class Trackers:
    """All of a run's trackers. One that fails is dropped with one warning; training goes on."""

    def __init__(self, config: AnyConfig, directory: Path) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name in config.tracking.backends:
            try:
                self._trackers[name] = TRACKERS[name](config, directory)
            except Exception as error:
                self._drop(name, error)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one generation's points."""
        self._each(lambda tracker: tracker.log(step, scalars))

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Close all trackers."""
        self._each(lambda tracker: tracker.finish(summary, lineage))

    def _each(self, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                use(tracker)
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        reason = " ".join(str(error).split())[:300]
        warnings.warn(f"tracking.backends: {name} failed and is off from here on: {reason}", EvorlWarning, stacklevel=2)


__all__ = ["TRACKERS", "Row", "Tracker", "Trackers"]
