"""Which agents go on. A selection is a pure function of the fitness and a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config import Selection


class Place(NamedTuple):
    """A place in the next generation: which agent fills it, and whether as a child that may mutate or as itself."""

    parent: int
    child: bool


def tournament(fitness: NDArray[np.float64], settings: Selection, rng: np.random.Generator) -> list[Place]:
    """The elite as itself, then children of the winners of tournaments of `size` different agents.

    The best of `size` agents drawn without replacement wins (Miller & Goldberg 1995).
    """
    places = [Place(elite(fitness), child=False)] if settings.elitism else []
    while len(places) < len(fitness):
        entrants = rng.choice(len(fitness), size=settings.size, replace=False)
        places.append(Place(int(entrants[np.argmax(_ranked(fitness)[entrants])]), child=True))
    return places


def truncation(fitness: NDArray[np.float64], settings: Selection, rng: np.random.Generator) -> list[Place]:
    """The worst `share` give way to children of as many of the best (population-based training, arXiv 1711.09846).

    All others go on as themselves. At least one agent is replaced where there are two.
    """
    count = min(max(1, round(settings.share * len(fitness))), len(fitness) // 2)
    best_first = np.argsort(-_ranked(fitness), kind="stable")
    survivors = [Place(int(index), child=False) for index in best_first[: len(fitness) - count]]
    return survivors + [Place(int(rng.choice(best_first[:count])), child=True) for _ in range(count)]


def elite(fitness: NDArray[np.float64]) -> int:
    """The best agent; the first of several."""
    return int(np.argmax(_ranked(fitness)))


def _ranked(fitness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fitness in which an agent without a number is worse than any other."""
    return np.where(np.isnan(fitness), -np.inf, fitness)


SELECTIONS: Mapping[str, Callable[[NDArray[np.float64], Selection, np.random.Generator], list[Place]]] = {
    "tournament": tournament,
    "truncation": truncation,
}
