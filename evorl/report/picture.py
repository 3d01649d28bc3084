"""Matplotlib plots for papers and READMEs: one run with its agents, or several with confidence intervals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.report.data import Drawn, born_by
from evorl.report.figures import BEST, GROUPS, LOOKS, PLAIN, STEPS, Look, look, spans_a_decade, value_of
from evorl.report.statistics import POINTS, Group, cut_off, extent, groups, points
from evorl.runs.reading.lineage import Stage
from evorl.system.files import check_folder, replacing
from evorl.tracking.tracker import thinned
from evorl.types.messages import on_one_line
from evorl.types.outcomes import UserError

FORMATS = (".png", ".svg", ".pdf")
THIN, THICK = 1.0, 2.2


def check_output(path: Path) -> None:
    """Raise UserError unless the file can be written in a supported format."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a plot is written as one of {', '.join(FORMATS)}")
    check_folder(path)


def draw(runs: Sequence[Drawn], output: Path, hyperparameter: str | None = None) -> None:
    """Plot one or more runs to a file.

    A single run is drawn with all its agents, and a `hyperparameter` below if given; several are compared in groups.
    Raises UserError if no agent has the hyperparameter, or if it is given for several runs.
    """
    from matplotlib.figure import Figure

    if len(runs) > 1 and hyperparameter is not None:
        raise UserError(f"--hyperparameter: applies to one run only, but {len(runs)} were given")
    figure = Figure(figsize=(8, 4.5) if hyperparameter is None else (8, 6), layout="constrained")
    if len(runs) > 1:
        _compare(figure, groups(runs))
    else:
        _agents(figure, runs[0], hyperparameter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # Missing glyphs are drawn as boxes.
        with replacing(output) as file:
            figure.savefig(file, dpi=120, format=output.suffix.removeprefix("."))


def _agents(figure: Any, run: Drawn, hyperparameter: str | None) -> None:
    ratios = {"height_ratios": (3, 1)} if hyperparameter else {}
    axes = figure.subplots(2 if hyperparameter else 1, 1, sharex=True, squeeze=False, **ratios)[:, 0]
    used = _drawn(axes[0], run, lambda life: life.fitness)
    if not run.is_rated:  # The elite's mean result and the target are on another scale than ratings.
        scores = [(row.agent_steps, row.elite_fitness) for row in run.generations if row.elite_fitness is not None]
        best = thinned(scores, POINTS)
        dotted = {"where": "post", "color": "k", "linewidth": THIN, "linestyle": ":", "label": "best so far"}
        axes[0].step(*zip(*best, strict=True) if best else ([], []), **dotted)
        if run.target is not None:
            label = f"target {run.target:g}"
            axes[0].axhline(run.target, color="#009e73", linestyle="--", linewidth=THIN, label=label)
    for kind in used:
        words = _plain(kind.words)
        axes[0].plot([], [], color=kind.colour, marker=kind.marker, markersize=4, linewidth=THIN, label=words)
    axes[0].set_ylabel(_plain(run.fitness_name))
    if (cut := cut_off(life.fitness for life in run.lives)) is not None:
        axes[0].set_ylim(cut.fence, axes[0].dataLim.y1 + 0.06 * (axes[0].dataLim.y1 - cut.fence))
        axes[0].text(0.99, 0.01, cut.words, transform=axes[0].transAxes, fontsize=7, ha="right", va="bottom")
    axes[0].legend(fontsize=8, edgecolor="none", framealpha=0.9)
    axes[0].set_title(_plain(f"{run.setting('algorithm.name')} on {run.setting('environment.id')}"), fontsize=10)
    if hyperparameter:
        names = dict.fromkeys(name for life in run.lives for name in life.hyperparameters)
        if hyperparameter not in names:
            there = ", ".join(names)
            raise UserError(f"--hyperparameter: agents of {run.name} have no {hyperparameter!r}; they have {there}")
        _drawn(axes[1], run, lambda life: value_of(life, hyperparameter, run))
        axes[1].set_ylabel(_plain(hyperparameter))
        drawn = (value_of(life, hyperparameter, run) for life in run.lives)
        if spans_a_decade([value for value in drawn if value is not None]):
            axes[1].set_yscale("log")
    for axis in axes:
        _tidy(axis)
    axes[-1].set_xlabel(STEPS)


def _drawn(axis: Any, run: Drawn, value: Callable[[Stage], float | None]) -> list[Look]:
    """Draw a line to each life from its predecessor, and the elite's lineage; return the looks used, for the legend."""
    steps = run.steps
    looks: dict[Look, None] = {}
    for life in run.lives:
        before = run.parents.get((life.generation, life.id))
        kind = look(born_by(life, before))
        looks[kind] = None
        ends = [stage for stage in (before, life) if stage is not None]
        axis.plot(
            [steps[stage.generation] for stage in ends],
            [float("nan") if (number := value(stage)) is None else number for stage in ends],
            color=kind.colour, marker=kind.marker, markersize=3 if kind == PLAIN else 4.5,
            linewidth=THIN, markevery=[-1],
        )  # fmt: skip
    path = [(steps[life.generation], y) for life in run.path if (y := value(life)) is not None]
    # Below the agents' own lines, so that their markers can be seen.
    style = {"color": "k", "linewidth": 1.6 * THICK, "zorder": 1.9, "label": "the winner's path"}
    axis.plot(*zip(*path, strict=True) if path else ([], []), **style)
    return sorted(looks, key=list(dict.fromkeys([*LOOKS.values(), *looks])).index)


def _compare(figure: Any, together: Sequence[Group]) -> None:
    axis = figure.subplots()
    for number, group in enumerate(together):
        colour = GROUPS[number % len(GROUPS)]
        for run in group.runs:
            steps, scores = points(run)
            axis.plot(steps, scores, color=colour, linewidth=THIN, alpha=0.4, marker=_marker(steps))
        grid, means = group.curve()
        drawn = {"color": colour, "linewidth": THICK, "marker": _marker(grid), "markersize": 8}
        axis.plot(grid, [mean.mean for mean in means], label=_plain(group.title), **drawn)
        if means and means[0].low is not None:
            ends = [[getattr(mean, end) for mean in means] for end in ("low", "high")]
            axis.fill_between(grid, *ends, color=colour, alpha=0.15, linewidth=0)
    if (limits := extent([score for group in together for score in group.scores()])) is not None:
        axis.set_ylim(limits)
    axis.set_xlabel(STEPS)
    axis.set_ylabel(BEST)
    axis.legend(fontsize=8, edgecolor="none", framealpha=0.9)
    _tidy(axis)


def _marker(values: Sequence[float] | NDArray[np.float64]) -> str:
    """Return the marker of a curve: none, unless it has only one point, which no line shows."""
    return "o" if len(values) == 1 else ""


def _tidy(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def _plain(words: str) -> str:
    """Put text on one line and escape `$`, which matplotlib would parse as mathtext."""
    return on_one_line(words, 120).replace("$", "\\$")
