"""Rollouts and replay buffers: storage, sampling and the update schedule."""

from evorl.replay.protocols import Gather, Pace, Population

__all__ = ["Gather", "Pace", "Population"]
