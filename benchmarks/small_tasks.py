"""Train every configuration for discrete actions on four small tasks, and print who solved what after how many steps.

    python benchmarks/small_tasks.py --runs runs/small [--seeds 1 2 3] [--only ppo a2c] [--tasks CartPole-v1]
    python benchmarks/small_tasks.py

A configuration keeps all of its settings but the environment, its target and the number of steps, so the table says
how far general settings carry; recurrent agents see all of an observation. A run ends when it is solved, as any run is,
or after `--seconds` of CPU time of all its processes. Each adds a line to benchmarks/data/small_tasks.jsonl. Those that
have one are not repeated, and several processes of one machine can share the work. Without `--runs` the command only
prints the table of docs/results/learning.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from curves import train
from records import ROOT, append, claimed, read_lines, revision

from evorl.system.processes import cpu

DATA = ROOT / "benchmarks" / "data" / "small_tasks.jsonl"
TASKS: Mapping[str, float] = {"CartPole-v1": 475, "Acrobot-v1": -100, "MountainCar-v0": -110, "LunarLander-v3": 200}
"""Environments, and the mean return of each from which Gymnasium counts it as solved."""
NAMES = (
    "dqn",
    "dqn_per",
    "c51",
    "qr_dqn",
    "rainbow",
    "dqn_recurrent",
    "sac_discrete",
    "a2c",
    "ppo",
    "ppo_recurrent",
    "a3c",
    "a3c_data_parallel",
    "a3c_shared",
    "impala",
    "appo",
    "apex_dqn",
)
MAX_STEPS = 1_000_000


class Job(NamedTuple):
    """A run: a shipped configuration, an environment and a seed."""

    name: str
    task: str
    seed: int

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings in which it differs from the shipped configuration."""
        return (
            f"environment.id={self.task}",
            "environment.observation_indices=null",
            f"training.target_fitness={TASKS[self.task]}",
            f"training.max_steps={MAX_STEPS}",
        )


def jobs(names: Sequence[str], tasks: Sequence[str], seeds: Sequence[int]) -> Iterator[Job]:
    """All runs, one seed of everything after the other, so that the table is balanced at any time."""
    for seed in seeds:
        for task in tasks:
            yield from (Job(name, task, seed) for name in names)


def line_of(job: Job, run: Path, code: str, limit: float) -> dict[str, Any]:
    """Build the line of a run of revision `code`: when it was solved, if it was, and each generation's best fitness.

    `limit` is the CPU time in seconds after which it was ended.
    """
    rows = read_lines(run / "metrics.jsonl")
    return {
        **job._asdict(),
        "revision": code,
        "machine": cpu(),
        "limit": limit,
        "solved": bool(rows and rows[-1]["solved"]),
        "steps": [row["agent_steps"] for row in rows],
        "best": [None if row["best_fitness"] is None else round(row["best_fitness"], 1) for row in rows],
        "seconds": round(rows[-1]["wall_clock_seconds"], 1) if rows else None,
    }


def cell(lines: Sequence[Mapping[str, Any]]) -> str:
    """One entry of the table: the thousands of steps of each agent until solved, or the best fitness in brackets."""
    found = []
    for line in sorted(lines, key=lambda line: int(line["seed"])):
        best = max((value for value in line["best"] if value is not None), default=None)
        failed = "(none)" if best is None else f"({best:.0f})"
        found.append(f"{round(line['steps'][-1] / 1000)}" if line["solved"] else failed)
    return ", ".join(found)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of docs/results/learning.md."""
    by_cell = defaultdict(list)
    for line in lines:
        by_cell[line["name"], line["task"]].append(line)
    rows = ["| configuration | " + " | ".join(TASKS) + " |", "|---" * (len(TASKS) + 1) + "|"]
    for name in NAMES:
        rows.append(f"| {name} | " + " | ".join(cell(by_cell[name, task]) for task in TASKS) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the runs are kept; without it, nothing is trained")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=240, help="limit of CPU time of a run")
    parser.add_argument("--data", type=Path, default=DATA)
    parsed = parser.parse_args()
    if parsed.runs is not None:
        parsed.runs.mkdir(parents=True, exist_ok=True)
        for job in jobs(parsed.only, parsed.tasks, parsed.seeds):
            with claimed(job, parsed.runs) as is_free:
                done = {(line["name"], line["task"], line["seed"]) for line in read_lines(parsed.data)}
                if not is_free or job in done:
                    continue
                name = "-".join(map(str, job))
                code = revision()
                train(job.name, parsed.runs / name, parsed.seconds, job.settings, job.seed)
                append(parsed.data, line := line_of(job, parsed.runs / name, code, parsed.seconds))
                shutil.rmtree(parsed.runs / name)
                print(name, line["solved"], line["steps"][-1:], json.dumps(line["best"][-1:]), flush=True)
    print(table(read_lines(parsed.data)))


if __name__ == "__main__":
    main()
