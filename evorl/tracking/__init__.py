"""Experiment trackers: Weights & Biases, TensorBoard and Trackio."""

from evorl.tracking.tracker import (
    TRACKER_PATIENCE,
    AgentRecord,
    History,
    Points,
    Record,
    Tracker,
    check_exclusions,
    shared_settings,
)
from evorl.tracking.trackers import TRACKERS, Trackers, announcements

__all__ = [
    "TRACKERS",
    "TRACKER_PATIENCE",
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
