"""Ranks and how they find each other: the only room that talks to other processes."""

from evorl.distributed.placement import Placement
from evorl.distributed.ranks import Launch, Peer, RankLost, Ranks, is_initialized, own_world, shutdown

__all__ = ["Launch", "Peer", "Placement", "RankLost", "Ranks", "is_initialized", "own_world", "shutdown"]
