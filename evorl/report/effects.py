"""The effect of mutations on fitness: what children reach, less what their parents had reached."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from evorl.report.data import Drawn, born_by
from evorl.report.statistics import Interval, interval


@dataclass(frozen=True)
class Effect:
    """The `changes` of fitness over the generations that began with one `kind` of mutation of one `target`.

    A generation of training lies between parent and child, so a mutation's effect is its mean less that of no mutation.
    """

    kind: str
    target: str
    changes: tuple[float, ...]

    @property
    def interval(self) -> Interval:
        return interval(self.changes)

    @property
    def improved(self) -> float:
        """Return the share of children that were better than their parents."""
        return sum(change > 0 for change in self.changes) / len(self.changes)


def effects(run: Drawn) -> list[Effect]:
    """Return the effects of all mutations of a run: first by their kinds, then of each hyperparameter."""
    parents = run.parents()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for life in run.lives:
        parent = parents.get((life.generation, life.id))
        if parent is None or parent.fitness is None or life.fitness is None:
            continue
        kind, change = born_by(life, parent), life.fitness - parent.fitness
        found[kind, ""].append(change)
        if kind == "hyperparameters":
            found[kind, life.mutation.target].append(change)
    ordered = sorted(found.items(), key=lambda item: (item[0][0] != "none", item[0]))
    return [Effect(kind, target, tuple(changes)) for (kind, target), changes in ordered]
