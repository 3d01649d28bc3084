"""The effect of mutations on fitness: what children reach, less what their parents had reached.

Parents are selected for their fitness, which is partly luck, so children fall back towards the mean whatever was done
to them. Only children whose parents were selected in the same way can be compared with each other.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

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
    changes: tuple[float, ...]

    @property
    def interval(self) -> Interval:
        return interval(self.changes)

    @property
    def improved(self) -> float:
        """Return the share of children that were better than their parents."""
        return sum(change > 0 for change in self.changes) / len(self.changes)


def effects(run: Drawn) -> list[Effect]:
    """Return the effects of all mutations of a run: first by their kinds, then of each hyperparameter.

    The kind `none` holds the children that were not mutated. Agents that went on as themselves are in no kind: the
    elite is the best of its generation, so it falls back further than the parents of children do.
    """
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
    ordered = sorted(found.items(), key=lambda item: (item[0][0] != "none", item[0]))
    return [Effect(kind, target, tuple(changes)) for (kind, target), changes in ordered]
