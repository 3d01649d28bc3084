"""What agents store, and which of it is due to be learned from."""

from evorl.replay.protocols import Gather, Pace, Population

__all__ = ["Gather", "Pace", "Population"]
