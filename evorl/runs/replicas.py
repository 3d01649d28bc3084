"""Gathering the trained agents of all ranks, and detecting replicas of the population that have drifted apart."""

from __future__ import annotations

from collections.abc import Sequence

from evorl.distributed import Peer, Placement
from evorl.population import Learner
from evorl.system.files import digest
from evorl.system.formats import decode_agents, encode_agents
from evorl.types import Agent


def gather_agents(learner: Learner, placement: Placement) -> tuple[list[Agent], list[int]]:
    """Return all trained agents, the same on every rank, and the ranks whose replicas differed from rank 0.

    If replicas have drifted apart, every rank takes the agents of rank 0.
    """
    ranks, payload = placement.ranks, encode_agents(learner.to_agents())
    if placement.is_sharded:
        parts = ranks.gather_bytes(payload, "the other ranks' trained agents")
        return [agent for part in parts for agent in decode_agents(part, "another rank's agents")], []
    drifted = ranks.differing(digest(payload), "trained agents")
    if not drifted:
        return learner.policy.agents, []
    return decode_agents(ranks.broadcast_bytes(payload, "rank 0's agents"), "rank 0's agents"), drifted


def drift_warning(peers: Sequence[Peer], drifted: Sequence[int], generation: int) -> str:
    """Format the warning for ranks whose replicas differ from rank 0."""
    others = sorted({peers[rank].cpu for rank in drifted} - {peers[0].cpu})
    cause = (
        f"{', '.join(others)} rounds otherwise than {peers[0].cpu}" if others else "although their CPUs are of a kind"
    )
    ranks = f"rank {', '.join(map(str, drifted))}"
    return f"{ranks} trained other agents than rank 0 in generation {generation} ({cause}); those of rank 0 are taken"
