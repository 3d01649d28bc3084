"""Rollouts and replay buffers: storage, sampling and the update schedule."""

from evorl.replay.protocols import Pace, Population
from evorl.replay.statistics import Gather

__all__ = ["Gather", "Pace", "Population"]
