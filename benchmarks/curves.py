"""Train each shipped configuration once, and draw the learning curves of docs/algorithms.md.

    nice -n 10 python benchmarks/curves.py --runs /tmp/curves [NAME ...] [--seconds 240]

Atari's configurations are left out: their runs take hours. A run has its configuration's own settings and seed 1, and
is stopped after `--seconds` of CPU time, all of its processes together, if it has not met its target by then. It ends
with the last generation that was complete; where no actor processes collect, a longer limit would extend the curve and
change nothing before. Whatever is in the data is not trained again, so an interrupted command continues where it was.
`--seconds 0` only draws.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import psutil

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from records import ROOT, append, read_lines

from evorl.config import AnyConfig, read_yaml, validate
from evorl.config.algorithms import SETTINGS
from evorl.config.yaml import TRAINING, shipped_names

SEED = 1
COLUMNS = 4
QUANTILES = (0, 0.25, 0.5, 0.75, 1)
LINE, TARGET = "#0072b2", "#d55e00"
Line = Mapping[str, Any]


def trainable() -> dict[str, AnyConfig]:
    """Read the shipped configurations outside Atari, by algorithm in the registry's order."""
    configs = {name: validate(read_yaml(TRAINING / f"{name}.yaml")) for name in shipped_names()}
    names = [name for name, config in configs.items() if not config.environment.id.startswith("ALE/")]
    order = list(SETTINGS)
    return {name: configs[name] for name in sorted(names, key=lambda name: order.index(configs[name].algorithm.name))}


def train(name: str, run: Path, seconds: float, settings: Sequence[str] = (), seed: int = SEED) -> bool:
    """Train a configuration in a directory until its target or for so much CPU time; tell whether it ended by itself.

    Raises RuntimeError if the run fails.
    """
    shutil.rmtree(run, ignore_errors=True)  # of a command that was interrupted
    place = [f"run.directory={run.parent}", f"run.name={run.name}", "run.threads=1", "tracking.backends=[]"]
    command = [sys.executable, "-m", "evorl", "train", name, *settings, "--seed", str(seed), *place]
    with run.with_suffix(".log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while (code := process.poll()) is None:
                time.sleep(1)
                if cpu_seconds(process.pid) > seconds:
                    return False
        finally:
            process.terminate()
    if code:
        raise RuntimeError(f"{name}: exit code {code}; see {log.name}")
    return True


def cpu_seconds(pid: int) -> float:
    """Sum the CPU time of a process and of its descendants, including those that have ended."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def curve(name: str, config: AnyConfig, run: Path, complete: bool) -> dict[str, Any]:
    """Build a run's line of the data: the steps and the agents' mean returns of each generation.

    Raises RuntimeError if no generation is complete.
    """
    rows = read_lines(run / "metrics.jsonl")
    known = [(row["agent_steps"], [value for value in row["fitness"] if value is not None]) for row in rows]
    if not any(values for _, values in known):
        raise RuntimeError(f"{name}: no generation is complete; take a larger --seconds")
    steps, fitness = zip(*((reached, values) for reached, values in known if values), strict=True)
    return {
        "configuration": name,
        "algorithm": config.algorithm.name,
        "environment": config.environment.id,
        "seed": SEED,
        "agents": config.population.size,
        "target": config.training.target_fitness,
        "complete": complete,
        "steps": steps,
        "mean": [round(float(np.mean(values)), 2) for values in fitness],
        "quantiles": [np.quantile(values, QUANTILES).round(2).tolist() for values in fitness],
    }


def draw(lines: Sequence[Line], picture: Path) -> None:
    """Plot a panel per configuration: the median agent, the range over the population, and the target.

    The background is opaque, so that the figure is readable on light and on dark pages.
    """
    count = math.ceil(len(lines) / COLUMNS)
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(count, COLUMNS, figsize=(2.6 * COLUMNS, 2.1 * count), squeeze=False)
        for axis in axes.flat[len(lines) :]:
            axis.remove()
        for axis, line in zip(axes.flat, lines, strict=False):
            steps, quantiles = np.array(line["steps"]) / 1000, np.array(line["quantiles"])
            axis.fill_between(steps, quantiles[:, 0], quantiles[:, -1], color=LINE, alpha=0.2, linewidth=0)
            axis.plot(steps, quantiles[:, 2], color=LINE, linewidth=1.4, marker="." if len(steps) < 4 else None)
            if line["target"] is not None:
                axis.axhline(line["target"], color=TARGET, linewidth=0.8, linestyle="--")
            axis.set_title(f"{line['configuration']}\n{line['environment']}, {line['agents']} agents", fontsize=8)
            axis.set_xlim(left=0)
        figure.supxlabel("environment steps of each agent (thousands)", fontsize=9)
        figure.supylabel("mean return", fontsize=9)
        figure.tight_layout()
        figure.savefig(picture, dpi=110, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations to train (default: all)")
    parser.add_argument("--seconds", type=float, default=240, help="limit of CPU time of a run")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "curves", help="where the runs are kept")
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data" / "curves.jsonl")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "curves.png")
    parsed = parser.parse_args()
    configs = trainable()
    if unknown := set(parsed.names) - set(configs):
        parser.error(
            f"no such configuration outside Atari: {', '.join(sorted(unknown))}; there are {', '.join(configs)}"
        )
    parsed.runs.mkdir(parents=True, exist_ok=True)
    done: dict[str, Line] = {line["configuration"]: line for line in read_lines(parsed.data)}
    for name in (parsed.names or configs) if parsed.seconds else ():
        if name not in done:
            complete = train(name, parsed.runs / name, parsed.seconds)
            done[name] = curve(name, configs[name], parsed.runs / name, complete)
            append(parsed.data, done[name])
            print(f"{name}: {done[name]['steps'][-1]:,} steps", flush=True)
    draw([done[name] for name in configs if name in done], parsed.figure)


if __name__ == "__main__":
    main()
