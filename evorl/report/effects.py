"""The effect of mutations on fitness: what children reach, less what their parents had reached.

Parents are selected for their fitness, which is partly luck, so children fall back towards the mean whatever was done
to them. Only children whose parents were selected in the same way can be compared with each other.
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
    """The `changes` of fitness over the generations that began with one `kind` of mutation of one `target`.

    A generation of training lies between parent and child, so a mutation's effect is its mean less that of no mutation.
    """

    kind: str
    target: str
    changes: Sequence[float] | NDArray[np.float64]

    @property
    def interval(self) -> Interval:
        return interval(self.changes)

    @property
    def improved(self) -> float:
        """Return the share of children that were better than their parents."""
        return float(np.mean(np.asarray(self.changes) > 0))


def effects(run: Drawn) -> list[Effect]:
    """Return the effects of all mutations of a run: first by their kinds, then of each hyperparameter.

    The kind `none` holds the children that were not mutated. Agents that went on as themselves are in no kind: the
    elite is the best of its generation, so it falls back further than the parents of children do.
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
    """Return effects by kind, then by target; first what the others are compared with."""
    ordered = sorted(found.items(), key=lambda item: (item[0][0] != "none", item[0]))
    return [Effect(kind, target, changes) for (kind, target), changes in ordered]
