"""The effect of mutations on fitness: the child's fitness minus its parent's.

Parents are selected for their fitness, which is partly luck, so their children regress to the mean whatever the
mutation. Only children whose parents were selected in the same way can be compared with each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evorl.records import RESTORED
from evorl.report.data import Drawn
from evorl.report.statistics import Interval, interval


@dataclass(frozen=True)
class Effect:
    """The fitness `changes` from parent to child for one `kind` of mutation of one `target`.

    A generation of training lies between parent and child, so the effect of a mutation is its mean minus that of
    children without mutation.
    """

    kind: str
    target: str
    changes: Sequence[float] | NDArray[np.float64]

    @property
    def interval(self) -> Interval:
        return interval(self.changes)

    @property
    def improved(self) -> float:
        """The fraction of children that were better than their parents."""
        return float(np.mean(np.asarray(self.changes) > 0))


def effects(run: Drawn) -> list[Effect]:
    """Return the effects of all mutations of a run, by kind and, for hyperparameters, also by name.

    The kind `none` holds the children that were not mutated. Agents that survived unchanged are excluded: the elite is
    the best of its generation, so it regresses further than the parents of children do.
    """
    if run.crowd is not None:
        return _ordered(run.crowd.effects)
    parents = run.parents()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for life in run.lives:
        parent = parents.get((life.generation, life.id))
        if parent is None or parent.fitness is None or life.fitness is None:
            continue
        if parent.id == life.id or life.mutation == RESTORED:
            continue
        kind, change = life.mutation.kind, life.fitness - parent.fitness
        found[kind, ""].append(change)
        if kind == "hyperparameters":
            found[kind, life.mutation.target].append(change)
    return _ordered({key: tuple(changes) for key, changes in found.items()})


def _ordered(found: Mapping[tuple[str, str], Sequence[float] | NDArray[np.float64]]) -> list[Effect]:
    """Sort by kind, then by target, with the baseline `none` first."""
    ordered = sorted(found.items(), key=lambda item: (item[0][0] != "none", item[0]))
    return [Effect(kind, target, changes) for (kind, target), changes in ordered]
