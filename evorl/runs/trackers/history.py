"""The records of a run before it was resumed, and those of them that a tracker lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evorl.records import Mutation

Points = Mapping[str, float]
History = Sequence[tuple[int, int, Points]]
"""For each generation, in their order: its number, the environment steps of all agents at its end, and its points."""


def lacking(history: History, first: int) -> History:
    """Return the generations that a tracker lacks which has all those before `first`."""
    return [entry for entry in history if entry[0] >= first]


def with_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `lineage.jsonl` as tables show it: what a mutation changed in words."""
    return {**row, "mutation": str(Mutation(**row["mutation"]))}
