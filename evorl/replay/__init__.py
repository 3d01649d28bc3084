"""Rollouts and replay buffers: storage, sampling and the update schedule."""

from evorl.replay.moments import Gather
from evorl.replay.protocols import Pace, Population

__all__ = ["Gather", "Pace", "Population"]
