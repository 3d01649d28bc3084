"""Record what runs on hard tasks reached, and draw the curves of docs/results/tasks.md.

    python benchmarks/experiments/tasks.py RUN [RUN ...] --revision REVISION [--episodes 100]
    python benchmarks/experiments/tasks.py

A run's line in benchmarks/data/tasks.jsonl.gz has its learning curve and the returns of its elite on fresh episodes; a run
of the same name, task, algorithm and seed is replaced. Without runs the command only draws.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from evorl.config import read_yaml, validate
from evorl.system.processes import cpu

sys.path.append(str(Path(__file__).parents[1]))
from records import DATA, ROOT, evaluated, read_lines, replace_lines

LINES = DATA / "tasks.jsonl.gz"
PICTURE = ROOT / "docs" / "tasks.png"
COLUMNS = 3
Line = Mapping[str, Any]


def record(run: Path, episodes: int, code: str) -> dict[str, Any]:
    """Build the line of a run of revision `code`: its curves, and its elite's score on new episodes.

    Curves have one value per generation and agent. Steps are those of each agent, seconds of wall clock and cumulative.
    """
    config = validate(read_yaml(run / "config.yaml"))
    rows = read_lines(run / "metrics.jsonl")
    return {
        "run": run.name,
        "environment": config.environment.id + (", RAM" if config.environment.kwargs.get("obs_type") == "ram" else ""),
        "algorithm": config.algorithm.name,
        "seed": config.seed,
        "agents": config.population.size,
        "revision": code,
        "machine": cpu(),
        "target": config.training.target_fitness,
        "steps": [row["agent_steps"] for row in rows],
        "seconds": [round(row["wall_clock_seconds"], 1) for row in rows],
        "fitness": [[_rounded(value) for value in row["fitness"]] for row in rows],
        "train_return": [[_rounded(value) for value in row["train_return"]] for row in rows],
        "episodes": episodes,
        "held_out": evaluated(run, episodes),
    }


def identity(line: Line) -> tuple[Any, ...]:
    """The fields by which a run recorded again is recognised."""
    return tuple(line[key] for key in ("run", "environment", "algorithm", "seed"))


def draw(lines: Sequence[Line], picture: Path) -> None:
    """Plot a panel for each task, with a curve for each run: the highest mean return of training episodes of an agent.

    A dot is the elite on fresh episodes. The background is opaque, so that the figure is readable on light and on dark
    pages.
    """
    colours = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(line["algorithm"] for line in lines))}
    tasks = sorted({line["environment"] for line in lines})
    rows = math.ceil(len(tasks) / COLUMNS)
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        size = 3.6 * COLUMNS, 2.6 * rows
        figure, axes = plt.subplots(rows, COLUMNS, figsize=size, squeeze=False, layout="constrained")
        for axis in axes.flat[len(tasks) :]:
            axis.remove()
        for axis, task in zip(axes.flat, tasks, strict=False):
            of_task = [line for line in lines if line["environment"] == task]
            for line in of_task:
                steps, returns = np.array(line["steps"]) / 1e6, np.array(line["train_return"], dtype=float)
                best, colour = np.fmax.reduce(returns, 1), colours[line["algorithm"]]
                ended = np.isfinite(best)  # In some generations of long episodes none ends.
                axis.plot(steps[ended], best[ended], color=colour, linewidth=1)
                axis.plot(steps[-1], line["held_out"]["mean"], "o", color=colour, markersize=4, clip_on=False)
            for name in dict.fromkeys(line["algorithm"] for line in of_task):
                axis.plot([], color=colours[name], label=name)
            axis.legend(frameon=False, fontsize=7)
            axis.set_title(task, fontsize=9)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        figure.supxlabel("environment steps of each agent (millions)", fontsize=9)
        figure.supylabel("mean return", fontsize=9)
        figure.savefig(picture, dpi=110, facecolor="white")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directories of runs")
    parser.add_argument("--episodes", type=int, default=100, help="fresh episodes of the elite")
    parser.add_argument("--revision", help="of the code that trained the runs")
    parsed = parser.parse_args()
    if parsed.runs and parsed.revision is None:
        parser.error("--revision: name that of the code that trained the runs")
    lines = replace_lines(LINES, [record(run, parsed.episodes, parsed.revision) for run in parsed.runs], identity)
    draw(lines, PICTURE)


if __name__ == "__main__":
    main()
