"""The registry of trackers available as `tracking.backends`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from evorl.config import AnyConfig
from evorl.runs.trackers.base import Tracker
from evorl.runs.trackers.record import History
from evorl.runs.trackers.tensorboard import TensorBoard
from evorl.runs.trackers.wandb import WeightsAndBiases

TRACKERS: Mapping[str, Callable[[AnyConfig, Path, History], Tracker]] = {
    "wandb": WeightsAndBiases,
    "tensorboard": TensorBoard,
}
"""Factories (configuration, run directory, history) -> tracker. On resume, a tracker logs the part of the history that
it lacks and discards what it logged after it."""
