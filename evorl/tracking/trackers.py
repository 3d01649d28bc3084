"""The registry of trackers, and the trackers of a run, of which those that fail are dropped."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evorl.config import AnyConfig
from evorl.system.plugins import place
from evorl.system.signals import note_activity
from evorl.tracking.tensorboard import TensorBoard
from evorl.tracking.tracker import TRACKER_PATIENCE, History, Points, Record, Row, Tracker
from evorl.tracking.trackio import Trackio, sent_to_trackio
from evorl.tracking.wandb import WeightsAndBiases, sent_to_wandb
from evorl.types.messages import message_of
from evorl.types.outcomes import EvorlWarning

TRACKERS: Mapping[str, Callable[[AnyConfig, Path, History], Tracker]] = {
    "wandb": WeightsAndBiases,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}
"""Factories (configuration, run directory, history) -> tracker, by name in `tracking.backends`."""
SENDING: Mapping[str, Callable[[AnyConfig], str]] = {
    "wandb": sent_to_wandb,
    "trackio": sent_to_trackio,
}
"""Of trackers that may send something to another machine: configuration -> a line on what goes where, or ""."""

GRACE = 5.0
"""Seconds beyond `TRACKER_PATIENCE` before a tracker is abandoned, so that it can first report its own timeout."""


def announcements(config: AnyConfig) -> list[str]:
    """Return the lines on what the trackers of a run will send to other machines."""
    lines = []
    for name in dict.fromkeys(config.tracking.backends):
        # A tracker that cannot say what it sends cannot start either, and is then reported and dropped.
        with contextlib.suppress(Exception):
            lines += [SENDING[name](config)] if name in SENDING else []
    return list(filter(None, lines))


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning; training continues."""

    def __init__(self, config: AnyConfig, directory: Path, history: History) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(config.tracking.backends):
            try:
                self._trackers[name] = TRACKERS[name](config, directory, history)
            except Exception as error:
                self._drop(name, error)

    def log(self, record: Record) -> None:
        self._each(lambda tracker: tracker.log(record))

    def log_within(self, step: int, points: Points) -> None:
        self._each(lambda tracker: tracker.log_within(step, points))

    def log_video(self, step: int, path: Path) -> None:
        self._each(lambda tracker: tracker.log_video(step, path))

    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Close all trackers, abandoning those that take too long."""
        note_activity("the closing of trackers")
        self._each(lambda tracker: _within(TRACKER_PATIENCE + GRACE, lambda: tracker.finish(summary, lineage)))
        note_activity("")

    def _each(self, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                use(tracker)
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        reason = (message_of(error, 300) or type(error).__name__) + place(error)
        warnings.warn(f"tracking.backends: {name} failed and is off from here on: {reason}", EvorlWarning, stacklevel=2)


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` in a thread that is abandoned after `seconds`. Re-raises its exception, or raises TimeoutError."""
    failed: list[Exception] = []

    def attempt() -> None:
        try:
            work()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=attempt, name="tracker", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it did not close within {seconds:g} s")
    if failed:
        raise failed[0]
