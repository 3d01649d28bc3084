"""Ranks, rendezvous and collectives: the only package that communicates with other processes of a launch."""

from evorl.distributed.ranks import Launch, Peer, Placement, RankLost, Ranks, launched_device, own_world, shutdown

__all__ = ["Launch", "Peer", "Placement", "RankLost", "Ranks", "launched_device", "own_world", "shutdown"]
