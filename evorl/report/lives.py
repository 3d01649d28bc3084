"""All agents of a long run in all generations, as arrays. Axes: N lives (a life is one agent in one generation),
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
"""The number of newest generations with a hash index for parent lookup; older ones are searched linearly."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


LISTS: Mapping[str, set[type]] = {
    "agents": {int},
    "fitness": {float, int, type(None)},
    "parents": {int, type(None)},
    "parent_generations": {int, type(None)},
    "mutations": {str},
}
"""The lists [P] that are read from a line of `metrics.jsonl`, with the allowed types of their items."""
NEEDED = (*Generation.__dataclass_fields__, *LISTS)


@dataclass(frozen=True)
class Lives:
    """All lives of a run as arrays [N], in file order, with 28 bytes per life.

    `origin` is the index of a life's predecessor: the same agent a generation earlier, or its parent; -1 if there is
    none. `mutation` indexes `mutations`, pairs of kind and target. `starts` [G + 1] has the index of each generation's
    first life, and N at the end.
    """

    id: Ints
    fitness: Floats
    origin: Ints
    mutation: NDArray[np.int32]
    mutations: Sequence[tuple[str, str]]
    starts: Ints

    def generation(self, lives: Ints) -> Ints:
        """Return the generation index, from 0, of each of these lives."""
        return np.searchsorted(self.starts, lives, side="right") - 1

    def ancestors(self, life: int) -> Ints:
        """Return the lineage of a life as indices, from its first ancestor to itself."""
        path = []
        while life >= 0:
            path.append(life)
            life = int(self.origin[life])
        return np.array(path[::-1], dtype=np.int64)


def read_lives(metrics: JsonLines) -> tuple[list[Generation], list[int], Lives]:
    """Read the generations of a run, the byte offsets of their lines, and all lives.

    Raises ValueError or KeyError for invalid lines.
    """
    generations, offsets, reading = [], [], _Reading()
    for offset, row in metrics.members_at(NEEDED):
        generations.append(GENERATION.validate_python(row))
        offsets.append(offset)
        reading.add(generations[-1].generation, {name: _list(row, name) for name in LISTS})
    return generations, offsets, reading.lives()


class _Reading:
    """Accumulates lives, one generation at a time."""

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
        """Add a generation. Raises ValueError if its lists [P] differ in length or a fitness is not finite."""
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
        """Concatenate all generations."""
        return Lives(
            id=np.concatenate(self._ids),
            fitness=np.concatenate(self._fitness),
            origin=np.concatenate(self._origins),
            mutation=np.concatenate(self._mutations),
            mutations=[*map(_mutation, self._codes)],
            starts=np.array(self._starts),
        )

    def _older(self, generation: int, agent: int | None) -> int:
        """Return the index of an agent's life in an earlier generation, or -1."""
        if generation in self._recent:
            return self._recent[generation].get(-1 if agent is None else agent, -1)
        place = self._places.get(generation)
        if place is None:
            return -1
        hits = np.flatnonzero(self._ids[place] == agent)
        return self._starts[place] + int(hits[0]) if hits.size else -1


def _list(row: Row, name: str) -> list[Any]:
    """Return a list of a line. Raises ValueError if it is not a list or has items of other types."""
    values = row[name]
    if not isinstance(values, list) or not set(map(type, values)) <= LISTS[name]:
        raise ValueError(f"{name} of generation {row['generation']} is no list of what a run writes there")
    return values


class _Codes(dict[str, int]):
    """Consecutive integer codes for texts, assigned in order of first appearance."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _mutation(text: str) -> tuple[str, str]:
    """Split a mutation's text before its colon, such as `kind (target`, into kind and target."""
    kind, _, target = text.partition(" (")
    return kind, target.removesuffix(")")
