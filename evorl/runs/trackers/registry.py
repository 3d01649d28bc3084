"""The registry of trackers that a configuration can name."""

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
"""From the configuration, the run's directory and what a resumed run recorded before to the tracker, which logs of that
what it lacks and forgets what came after it."""
