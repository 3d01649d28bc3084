"""Statistics of reports: confidence intervals, the effects of mutations, and runs that differ only in the seed.

Axes: S seeds, N steps or values.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config.fields import leaves
from evorl.config.run import THEN
from evorl.report.data import Drawn
from evorl.tracking.tracker import thinned
from evorl.types.messages import shown
from evorl.types.outcomes import EvorlWarning

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t quantiles of 0.975 for 1 to 10 degrees of freedom (Abramowitz & Stegun 1964, table 26.10)."""
FEWEST = 4
"""The fewest values for which an interval is given: with three, the central 95 % of widths span a factor of 12."""
POINTS = 1_000
"""The maximum number of points of a curve; more would fall into the same pixel."""
APART = ("seed", "run", "tracking", "checkpoint")
"""Settings, or sections, in which the runs of a group may differ."""
NAMED = 3
"""The number of differing settings in a group's label; more only if labels need them to be distinct."""
Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """Sample size, mean and its 95 % confidence interval, which is None for fewer than `FEWEST` values."""

    number: int
    mean: float
    low: float | None
    high: float | None


def quantile(freedom: int) -> float:
    """Return Student's t quantile of 0.975; beyond the table by the expansion of Abramowitz & Stegun 1964, 26.7.5."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float] | Floats) -> Interval:
    """Return the mean of values [N], N >= 1, and its 95 % confidence interval (Student's t) if N >= `FEWEST`."""
    count, mean = len(values), float(np.mean(values))
    if count < FEWEST:
        return Interval(count, mean, None, None)
    half = quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(count, mean, mean - half, mean + half)


def result_interval(values: Sequence[float] | Floats) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of results [N], each from 0 to 1.

    It is Student's t interval, clipped to [0, 1]. If all N results are equal, that would have no width: its ends then
    assume the largest share of zeros, or of ones, that N equal results do not exclude (Clopper and Pearson 1934,
    Biometrika 26). With too few results it is [0, 1].
    """
    mean = interval(values)
    if mean.low is None or mean.high is None:
        return 0.0, 1.0
    if mean.low == mean.high:
        width = 1 - 0.025 ** (1 / mean.number)
        return mean.mean * (1 - width), mean.mean + (1 - mean.mean) * width
    return max(mean.low, 0.0), min(mean.high, 1.0)


def score_of(results: Floats) -> dict[str, Any]:
    """The score of a match from the results [N, 2] of its pairs of games, in the first and in the second seat.

    A result is 1, 0.5 or 0. The 95 % interval of their mean is over the N pairs, as the games of a pair begin alike.
    """
    return {
        "won": int((results == 1).sum()),
        "drawn": int((results == 0.5).sum()),
        "lost": int((results == 0).sum()),
        "mean": float(results.mean()),
        "interval": list(result_interval(results.mean(1))),
        "first_seat": float(results[:, 0].mean()),
        "second_seat": float(results[:, 1].mean()),
    }


def extent(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Return the range of the finite values, widened by 6 % on each side, or None if there are none.

    Axis ranges come from the data alone, so intervals may be cut off: a wide one would squeeze everything else.
    """
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


@dataclass(frozen=True)
class CutOff:
    """Tukey's lower fence, 1.5 interquartile ranges below the first quartile, and how many values an axis cuts off."""

    fence: float
    words: str


def cut_off(values: Iterable[float | None]) -> CutOff | None:
    """The fence if some values are below it, else None; without it a few failed agents would squeeze all others."""
    finite = np.array([value for value in values if value is not None and math.isfinite(value)])
    if finite.size == 0:
        return None
    first, third = np.quantile(finite, (0.25, 0.75))
    fence = float(first - 1.5 * (third - first))
    below = finite[finite < fence]
    if below.size == 0 or first == third:
        return None
    return CutOff(fence, f"{below.size} of {finite.size} values, down to {below.min():.4g}, are below")


@dataclass(frozen=True)
class Effect:
    """The fitness `changes` from parent to child for one `kind` of mutation of one `target`.

    Parents are selected for their fitness, which is partly luck, so their children regress to the mean whatever the
    mutation. Only children whose parents were selected in the same way can be compared with each other. A generation of
    training lies between parent and child, so the effect of a mutation is its mean minus that of children without
    mutation.
    """

    kind: str
    target: str
    changes: Sequence[float]

    @property
    def interval(self) -> Interval:
        return interval(self.changes)

    @property
    def improved(self) -> float:
        """The fraction of children that were better than their parents."""
        return float(np.mean(np.asarray(self.changes) > 0))


def effects(run: Drawn) -> list[Effect]:
    """Return the effects of all mutations of a run, by kind and, for hyperparameters, also by name.

    The kind `none` holds the children that were not mutated, and comes first: it is the baseline.
    """
    ordered = sorted(run.changes.items(), key=lambda item: (item[0][0] != "none", item[0]))
    return [Effect(kind, target, changes) for (kind, target), changes in ordered]


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, with a `label` that distinguishes it from other groups."""

    label: str
    runs: tuple[Drawn, ...]

    @property
    def title(self) -> str:
        """The label, with the name of its run or the number of its runs."""
        return f"{self.runs[0].name}: {self.label}" if len(self.runs) == 1 else f"{self.label} ({len(self.runs)} runs)"

    def scores(self) -> Floats:
        """Return the scores [N] of all runs, in no order."""
        return np.concatenate([points(run)[1] for run in self.runs])

    def curve(self) -> tuple[Floats, list[Interval]]:
        """Return steps [N] and the confidence interval over seeds at each, up to the end of the shortest run.

        Scores are interpolated linearly between generations. A run that ended because it was solved keeps its best
        agent, so only the others bound the curve. Runs without any score are left out.
        """
        measured = [(run, steps, scores) for run in self.runs for steps, scores in [points(run)] if len(steps)]
        if not measured:
            return np.zeros(0), []
        curves = [(steps, scores) for _, steps, scores in measured]
        first = max(steps[0] for steps, _ in curves)
        going_on = [steps[-1] for run, steps, _ in measured if run.summary.get("solved") is not True]
        last = min(going_on) if going_on else max(steps[-1] for steps, _ in curves)
        grid = np.unique(np.concatenate([steps for steps, _ in curves]))
        grid = grid[(grid >= first) & (grid <= last)]
        rows = np.stack([np.interp(grid, steps, scores) for steps, scores in curves])
        return grid, [interval(column.tolist()) for column in rows.T]


def points(run: Drawn) -> tuple[Floats, Floats]:
    """Return steps [N] and scores [N] of the best agent so far, for the generations of a run that have one."""
    measured = [(row.agent_steps, row.elite_fitness) for row in run.generations if row.elite_fitness is not None]
    steps, scores = np.array(thinned(measured, POINTS), dtype=np.float64).reshape(-1, 2).T
    return steps, scores


def groups(runs: Sequence[Drawn]) -> list[Group]:
    """Group runs by configuration, number of ranks and generation of a branch, in order of first appearance.

    Warns of equal seeds in a group, and of branches with the same origin.
    """
    kinds: dict[str, list[Drawn]] = {}
    for run in runs:
        settings = {name: value for name, value in run.config.items() if name not in APART}
        settings |= _circumstances(run)
        kinds.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    for members in kinds.values():
        _warn_of_dependence(members)
    configs = [{**leaves(members[0].config), **_circumstances(members[0])} for members in kinds.values()]
    labels = _labels([members[0] for members in kinds.values()], configs)
    return [Group(label, tuple(members)) for label, members in zip(labels, kinds.values(), strict=True)]


def _warn_of_dependence(runs: Sequence[Drawn]) -> None:
    """Warn if runs of one configuration share a seed, or branches the run in which they began: their intervals are too
    narrow."""
    sharing: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        begun = _origin(run)
        sharing[f"seed, {shown(run.setting('seed'))}" if begun is None else f"origin, {begun.run}"].append(run.name)
    for shared, names in sharing.items():
        if len(names) > 1:
            some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            what = f"{some}: the same settings and the same {shared}, so they are not {len(names)} independent runs"
            warnings.warn(f"{what}; leave all but one out", EvorlWarning, stacklevel=3)


class Origin(NamedTuple):
    """The run in which a branch began, or the branch that it is of; and the generation of each that it went on from."""

    run: str
    generations: str


def _origin(run: Drawn) -> Origin | None:
    """The root run of a branch and the generations that it went on from; None for a run that is no branch."""
    begun = run.setting("run.branch_of")
    if begun is None:
        return None
    steps = str(begun).split(THEN)
    return Origin(steps[0].rpartition(", ")[0], THEN.join(step.rpartition(", ")[2] for step in steps))


def _circumstances(run: Drawn) -> dict[str, Any]:
    """The conditions beside its settings by which a run is grouped: its number of ranks, and where a branch began.

    The number of ranks counts where it changes the updates: replicas make them larger, unless they split batches. A
    branch shares its first generations with the run that it began in, so the two are not independent; branches of
    several runs at one generation are.
    """
    is_alike = run.setting("algorithm.split_batches") is True or run.setting("population.placement") == "sharded"
    begun = _origin(run)
    at = {} if begun is None else {"branch_of": begun.generations}
    return ({} if is_alike else {"ranks": run.generations[-1].ranks}) | at


def _labels(runs: Sequence[Drawn], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return distinct labels of groups, of one run each: the task and the settings in which groups of this task differ.

    Settings have their full paths. The fewest that make the labels distinct come first, and others follow up to
    `NAMED`; those that only some of the configurations have come last.
    """
    bases = [f"{run.setting('algorithm.name')} on {run.setting('environment.id')}" for run in runs]
    labels = list(bases)
    for base in dict.fromkeys(bases):
        members = [number for number, other in enumerate(bases) if other == base]
        alike = [configs[number] for number in members]
        differing = [
            name
            for name in dict.fromkeys(chain.from_iterable(alike))
            if name.partition(".")[0] not in APART and len({str(config.get(name)) for config in alike}) > 1
        ]
        differing.sort(key=lambda name: any(name not in config for config in alike))
        named: list[str] = []
        while differing and (len(named) < NAMED or _kinds(alike, named) < len(alike)):
            # In a tie, max gives the first.
            named.append(max(differing, key=lambda name: _kinds(alike, [*named, name])))
            differing.remove(named[-1])
        for number, config in zip(members, alike, strict=True):
            words = [f"{name} {config[name]}" for name in named if name in config] + ["…"] * bool(differing)
            labels[number] = f"{base}: {', '.join(words)}" if named else base
    return labels


def _kinds(configs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    """Return how many of the configurations are distinct by these settings."""
    return len({tuple(str(config.get(name)) for name in names) for config in configs})
