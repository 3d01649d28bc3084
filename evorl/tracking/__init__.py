"""Where curves go, and the registry of trackers that a configuration can name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evorl.background import Background
from evorl.config import AnyConfig
from evorl.tracking.history import History, Points
from evorl.tracking.tensorboard import TensorBoard
from evorl.tracking.told import told
from evorl.tracking.wandb import WeightsAndBiases
from evorl.types import EvorlWarning

Row = Mapping[str, Any]
GRACE = 5.0
"""Seconds beyond `tracking.timeout`, in which a tracker that keeps to it can say what is missing."""


class Tracker(Protocol):
    """Somewhere that a run's numbers go."""

    def log(self, generation: int, step: int, scalars: Points) -> None:
        """Add a generation's points at `step`, the environment steps of all agents; both only grow."""

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Note how the run ended and who came from whom, and close."""


TRACKERS: Mapping[str, Callable[[AnyConfig, Path, History], Tracker]] = {
    "wandb": WeightsAndBiases,
    "tensorboard": TensorBoard,
}
"""From the configuration, the run's directory and what a resumed run recorded before to the tracker, which logs of that
what it lacks and forgets what came after it."""


class Trackers:
    """All of a run's trackers. One that fails is dropped with one warning; training goes on."""

    def __init__(self, config: AnyConfig, directory: Path, history: History = ()) -> None:
        self._deadline = config.tracking.timeout + GRACE
        self._trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(config.tracking.backends):
            try:
                self._trackers[name] = TRACKERS[name](config, directory, history)
            except Exception as error:
                self._drop(name, error)

    def log(self, generation: int, step: int, scalars: Points) -> None:
        """Add one generation's points."""
        self._each(lambda tracker: tracker.log(generation, step, scalars))

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Close all trackers, and leave behind those that take too long."""
        self._each(lambda tracker: _within(self._deadline, lambda: tracker.finish(summary, lineage)))

    def _each(self, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                use(tracker)
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        warnings.warn(f"tracking.backends: {name} failed and is off from here on: {reason}", EvorlWarning, stacklevel=2)


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Do `work` in a thread that is left behind after so many seconds. Raises what it raised, or TimeoutError."""
    failed: list[Exception] = []

    def attempt(over: threading.Event) -> None:
        try:
            work()
        except Exception as error:
            failed.append(error)

    thread = Background(attempt, "tracker")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it did not close within {seconds:g} s")
    if failed:
        raise failed[0]


__all__ = ["TRACKERS", "History", "Row", "Tracker", "Trackers", "told"]
