"""All agents of a long run in all generations, as arrays. Axes: N lives (an agent in a generation is one life),
G generations, P agents of a generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.report.generation import GENERATION, Generation
from evorl.runs.history import JsonLines, Row

RECENT = 64
"""Generations in which a parent is looked up at once; older ones are searched."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


LISTS: Mapping[str, set[type]] = {
    "agents": {int},
    "fitness": {float, int, type(None)},
    "parents": {int, type(None)},
    "parent_generations": {int, type(None)},
    "mutations": {str},
}
"""The lists [P] of a line of `metrics.jsonl` that are read, and the types of their items."""
NEEDED = (*Generation.__dataclass_fields__, *LISTS)


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
    """Return the generations of a run, where their lines begin in the file, and all lives.

    Raises ValueError and KeyError for lines that no run writes.
    """
    generations, offsets, reading = [], [], _Reading()
    for offset, row in metrics.members_at(NEEDED):
        generations.append(GENERATION.validate_python(row))
        offsets.append(offset)
        reading.add(generations[-1].generation, {name: _list(row, name) for name in LISTS})
    return generations, offsets, reading.lives()


class _Reading:
    """The lives of the generations that have been read so far."""

    def __init__(self) -> None:
        self._ids: list[Ints] = []
        self._fitness: list[Floats] = []
        self._origins: list[Ints] = []
        self._mutations: list[NDArray[np.int32]] = []
        self._starts = [0]
        self._codes = _Codes()
        self._recent: dict[int, dict[int, int]] = {}
        self._places: dict[int, int] = {}

    def add(self, generation: int, lists: Mapping[str, list[Any]]) -> None:
        """Add a generation. Raises ValueError where its lists [P] have different lengths, or hold what is no number."""
        agents, start, count = lists["agents"], self._starts[-1], len(lists["agents"])
        if any(len(values) != count for values in lists.values()):
            raise ValueError(f"generation {generation} has lists of different lengths")
        fitness = np.array(lists["fitness"], dtype=np.float64)
        if np.isfinite(fitness).sum() + lists["fitness"].count(None) < count:
            raise ValueError(f"generation {generation} has a fitness that is not finite")
        find = self._recent.get(generation - 1, {}).get
        same, parent = (
            np.fromiter(map(find, lists[name], repeat(-1)), np.int64, count) for name in ("agents", "parents")
        )
        born = np.array(lists["parent_generations"], dtype=np.float64)
        origin = np.where(same >= 0, same, np.where(born == generation - 1, parent, -1))
        for place in np.flatnonzero((same < 0) & (born < generation - 1)):
            origin[place] = self._older(int(born[place]), lists["parents"][place])
        self._ids.append(np.array(agents, dtype=np.int64))
        self._fitness.append(fitness)
        self._origins.append(origin)
        codes = [self._codes[text] for text, _, _ in map(str.partition, lists["mutations"], repeat(":"))]
        self._mutations.append(np.array(codes, dtype=np.int32))
        self._places[generation] = len(self._ids) - 1
        self._recent[generation] = dict(zip(agents, range(start, start + count), strict=True))
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        self._starts.append(start + count)

    def lives(self) -> Lives:
        """Return all lives."""
        return Lives(
            id=np.concatenate(self._ids),
            fitness=np.concatenate(self._fitness),
            origin=np.concatenate(self._origins),
            mutation=np.concatenate(self._mutations),
            mutations=[*map(_mutation, self._codes)],
            starts=np.array(self._starts),
        )

    def _older(self, generation: int, agent: int | None) -> int:
        """Return the life of an agent in an earlier generation, -1 where there is none."""
        if generation in self._recent:
            return self._recent[generation].get(-1 if agent is None else agent, -1)
        place = self._places.get(generation)
        if place is None:
            return -1
        hits = np.flatnonzero(self._ids[place] == agent)
        return self._starts[place] + int(hits[0]) if hits.size else -1


def _list(row: Row, name: str) -> list[Any]:
    """Return a list of a line. Raises ValueError where it is none, or has items of other types."""
    values = row[name]
    if not isinstance(values, list) or not set(map(type, values)) <= LISTS[name]:
        raise ValueError(f"{name} of generation {row['generation']} is no list of what a run writes there")
    return values


class _Codes(dict[str, int]):
    """Numbers for texts, in the order in which these come first."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _mutation(text: str) -> tuple[str, str]:
    """Return the kind and the target of a mutation's text up to its colon, as in `kind (target`."""
    kind, _, target = text.partition(" (")
    return kind, target.removesuffix(")")
