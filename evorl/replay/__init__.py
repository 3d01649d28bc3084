"""Rollouts and replay buffers: storage, sampling and the update schedule."""

from evorl.replay.experience import Experience, Pace
from evorl.replay.statistics import Gather

__all__ = ["Experience", "Gather", "Pace"]
