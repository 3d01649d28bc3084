"""The records passed to trackers: metrics of the population and of each agent, under standard names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evorl.records import Mutation

Points = Mapping[str, float]
"""Scalars by name, such as `losses/q_loss`; the part before the slash groups charts."""


@dataclass(frozen=True)
class AgentRecord:
    """One agent in one generation: its `points`, its parent, and the `mutation` that created it, in words."""

    id: int
    parent: int | None = None
    parent_generation: int | None = None
    mutation: str = "initial"
    points: Points = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    architectures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One generation, which ended after `step` environment steps of all agents.

    `points` are the metrics of the population; for metrics of agents, the mean over agents.
    """

    generation: int
    step: int
    points: Points
    agents: Sequence[AgentRecord] = ()


History = Iterable[Record]
"""The generations of a run before it was resumed, in order; can be iterated several times."""


def with_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `lineage.jsonl` with its mutation described in words."""
    return {**row, "mutation": str(Mutation(**row["mutation"]))}
