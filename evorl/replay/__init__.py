"""Rollouts and replay buffers: storage, sampling and the update schedule."""

from evorl.replay.experience import Experience, Pace

__all__ = ["Experience", "Pace"]
