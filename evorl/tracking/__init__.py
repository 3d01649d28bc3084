"""Experiment trackers: Weights & Biases, TensorBoard and Trackio."""

from evorl.tracking.tracker import AgentRecord, History, Points, Record, Tracker, check_exclusions, shared_settings
from evorl.tracking.trackers import TRACKERS, Trackers, announcements

__all__ = [
    "TRACKERS",
    "AgentRecord",
    "History",
    "Points",
    "Record",
    "Tracker",
    "Trackers",
    "announcements",
    "check_exclusions",
    "shared_settings",
]
