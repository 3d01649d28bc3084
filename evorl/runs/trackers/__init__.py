"""Experiment trackers: Weights & Biases and TensorBoard."""

from evorl.runs.trackers.base import Row, Tracker
from evorl.runs.trackers.record import History, Record
from evorl.runs.trackers.registry import TRACKERS
from evorl.runs.trackers.shared import shared_settings
from evorl.runs.trackers.trackers import Trackers

__all__ = ["TRACKERS", "History", "Record", "Row", "Tracker", "Trackers", "shared_settings"]
