"""Comparison of runs: those that differ only in the seed form a group, with a mean and a confidence interval.

Axes: S seeds, N steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.report.data import Drawn
from evorl.report.generation import Generation
from evorl.report.statistics import Interval, interval, thinned

APART = ("seed", "run", "tracking", "checkpoint")
"""Settings, or sections, in which the runs of a group may differ."""
Floats = NDArray[np.float64]

MEASURES: Mapping[str, tuple[str, Callable[[Generation], float | None]]] = {
    "best": ("best agent so far", lambda row: row.elite_fitness),
    "mean": ("mean fitness of the population", lambda row: row.mean_fitness),
}


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, with a `label` that distinguishes it from other groups."""

    label: str
    runs: tuple[Drawn, ...]

    def curve(self, measure: str) -> tuple[Floats, list[Interval]]:
        """Return steps [N] and the confidence interval over seeds at each, up to the end of the shortest run.

        Values are interpolated linearly between generations. A run that ended because it was solved keeps its best
        agent, so for `best` the curve extends to the end of the longest run.
        """
        curves = [points(run, measure) for run in self.runs]
        first = max(steps[0] for steps, _ in curves)
        longest = max if measure == "best" else min
        last = longest(steps[-1] for steps, _ in curves)
        grid = np.unique(np.concatenate([steps for steps, _ in curves]))
        grid = grid[(grid >= first) & (grid <= last)]
        rows = np.stack([np.interp(grid, steps, values) for steps, values in curves])
        return grid, [interval(column.tolist()) for column in rows.T]


def points(run: Drawn, measure: str) -> tuple[Floats, Floats]:
    """Return steps [N] and values [N] of a measure, for the generations of a run that have a value."""
    _, of = MEASURES[measure]
    known = [(row.agent_steps, value) for row in run.generations if (value := of(row)) is not None]
    points = thinned(known) or [(run.generations[0].agent_steps, float("nan"))]
    steps, values = zip(*points, strict=True)
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def groups(runs: Sequence[Drawn]) -> list[Group]:
    """Group runs by configuration, in order of first appearance."""
    kinds: dict[str, list[Drawn]] = {}
    for run in runs:
        kept = {name: value for name, value in run.config.items() if name not in APART}
        kinds.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    configs = [_leaves(members[0].config) for members in kinds.values()]
    differing = [
        name
        for name in configs[0]
        if not name.startswith(APART) and len({str(config.get(name)) for config in configs}) > 1
    ]
    return [
        Group(_label(members[0], config, differing), tuple(members))
        for members, config in zip(kinds.values(), configs, strict=True)
    ]


def _label(run: Drawn, config: Mapping[str, Any], differing: Sequence[str]) -> str:
    own = [name for name in differing if name not in ("algorithm.name", "environment.id")]
    named = ", ".join(f"{name.rpartition('.')[2]} {config.get(name)}" for name in own[:3])
    base = f"{run.setting('algorithm.name')} on {run.setting('environment.id')}"
    return f"{base}: {named}" if named else base


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves
