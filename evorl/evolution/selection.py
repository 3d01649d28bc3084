"""Selection of the agents that go on: pure functions of the fitness and a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config import Selection


class Offspring(NamedTuple):
    """A place in the next generation: which candidate fills it, and whether as a child that may mutate or as itself."""

    parent: int
    child: bool


Select = Callable[[NDArray[np.float64], int, Selection, np.random.Generator], list[Offspring]]
"""Fills the places of the next generation, given the fitness of the candidates, how many of those are `archived`, the
settings and a generator. Archived candidates stand first; they are parents, and do not count for the population."""


def tournament(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Keep the elite as itself, then take children of the winners of tournaments of `size` different candidates.

    The best of `size` candidates drawn without replacement wins (Miller & Goldberg 1995).
    """
    places = [Offspring(elite(fitness), child=False)] if settings.elitism else []
    while len(places) < len(fitness) - archived:
        entrants = np.sort(rng.choice(len(fitness), size=settings.size, replace=False))
        places.append(Offspring(int(entrants[elite(fitness[entrants])]), child=True))
    return places


def truncation(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Replace the worst `share` by children of as many of the best (population-based training, arXiv 1711.09846).

    All others go on as themselves. At least one agent is replaced where there are two.
    """
    size = len(fitness) - archived
    count = min(max(1, round(settings.share * size)), size // 2)
    best_first = np.lexsort((-np.arange(len(fitness)), -_ranked(fitness)))
    population = best_first[best_first >= archived]
    survivors = [Offspring(int(index), child=False) for index in population[: size - count]]
    return survivors + [Offspring(int(rng.choice(best_first[: max(1, count)])), child=True) for _ in range(count)]


def elite(fitness: NDArray[np.float64]) -> int:
    """Return the best candidate's index; of several the last, which is the newest."""
    ranked = _ranked(fitness)
    return int(len(ranked) - 1 - np.argmax(ranked[::-1]))


def _ranked(fitness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fitness, in which an agent without a number is worse than any other."""
    return np.where(np.isnan(fitness), -np.inf, fitness)


def no_selection(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Keep every agent as itself."""
    return [Offspring(place, child=False) for place in range(archived, len(fitness))]


SELECTIONS: Mapping[str, Select] = {"tournament": tournament, "truncation": truncation, "none": no_selection}
