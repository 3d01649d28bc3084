"""Rollouts and replay buffers: storage, sampling and the update schedule."""

from evorl.replay.experience import Experience

__all__ = ["Experience"]
