"""All agents of a long run in all generations, as arrays. Axes: N lives (an agent in a generation is one life),
G generations, P agents of a generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from evorl.report.generation import GENERATION, Count, Generation, Number
from evorl.runs.history import JsonLines

RECENT = 64
"""Generations in which a parent is looked up at once; older ones are searched."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Members:
    """The agents of a generation, by lists [P] of its line of `metrics.jsonl`."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    agents: list[Count]
    fitness: list[Number | None]
    parents: list[Count | None]
    parent_generations: list[Count | None]
    mutations: list[str]


MEMBERS = TypeAdapter(Members)
NEEDED = (*Generation.__dataclass_fields__, *Members.__dataclass_fields__)


@dataclass(frozen=True)
class Lives:
    """All lives of a run as arrays [N], in the order of the files: 28 bytes for each.

    `origin` is the life that each was made from, that of the same agent a generation earlier or of its parent, -1 where
    there is none. `mutation` is a place in `mutations`, which have a kind and a target. A generation's lives begin at
    `starts` [G + 1].
    """

    id: Ints
    fitness: Floats
    origin: Ints
    mutation: NDArray[np.int32]
    mutations: Sequence[tuple[str, str]]
    starts: Ints

    def generation(self, lives: Ints) -> Ints:
        """Return the places of these lives' generations."""
        return np.searchsorted(self.starts, lives, side="right") - 1

    def ancestors(self, life: int) -> Ints:
        """Return a life and all that it came from, the first one first."""
        path = []
        while life >= 0:
            path.append(life)
            life = int(self.origin[life])
        return np.array(path[::-1], dtype=np.int64)


def read_lives(metrics: JsonLines) -> tuple[list[Generation], list[int], Lives]:
    """Return the generations of a run, where their lines begin in the file, and all lives."""
    generations: list[Generation] = []
    offsets: list[int] = []
    codes = _Codes()
    ids, fitness, origins, mutations, starts = [], [], [], [], [0]
    recent: dict[int, dict[int, int]] = {}
    places: dict[int, int] = {}
    for offset, row in metrics.members_at(NEEDED):
        one, members = GENERATION.validate_python(row), MEMBERS.validate_python(row)
        number, start = one.generation, starts[-1]
        before: Mapping[int, int] = recent.get(number - 1, {})

        def older(generation: int | None, parent: int | None, number: int = number) -> int:
            if generation is None or parent is None or generation >= number or generation not in places:
                return -1
            if generation in recent:
                return recent[generation].get(parent, -1)
            where = places[generation]
            hits = np.flatnonzero(ids[where] == parent)
            return starts[where] + int(hits[0]) if hits.size else -1

        here = {agent: place for place, agent in enumerate(members.agents, start=start)}
        made_from = [before.get(agent, -1) for agent in members.agents]
        lists = zip(made_from, members.parent_generations, members.parents, members.mutations, members.fitness,
                    strict=True)  # fmt: skip
        origins.append(np.array([
            same if same >= 0 else before.get(parent, -1) if generation == number - 1 else older(generation, parent)  # type: ignore[arg-type]
            for same, generation, parent, _, _ in lists
        ], dtype=np.int64))  # fmt: skip
        ids.append(np.array(members.agents, dtype=np.int64))
        fitness.append(np.array(members.fitness, dtype=np.float64))
        mutations.append(np.array([codes[text.partition(":")[0]] for text in members.mutations], dtype=np.int32))
        places[number] = len(generations)
        recent[number] = here
        if len(recent) > RECENT:
            del recent[next(iter(recent))]
        generations.append(one)
        offsets.append(offset)
        starts.append(start + len(members.agents))
    joined = [np.concatenate(parts) for parts in (ids, fitness, origins, mutations)]
    return generations, offsets, Lives(*joined, mutations=[*map(_mutation, codes)], starts=np.array(starts))


class _Codes(dict[str, int]):
    """Numbers for texts, in the order in which these come first."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _mutation(text: str) -> tuple[str, str]:
    """Return the kind and the target of a mutation's text up to its colon, as in `kind (target`."""
    kind, _, target = text.partition(" (")
    return kind, target.removesuffix(")")
