"""Train a configuration with several seeds, evaluate each elite on fresh episodes, and print one JSON line per seed.

    python benchmarks/learning.py [key=value ...] [--config FILE] [--processes 2] --seeds 1 2 3

Seconds are wall-clock time of the whole command, imports included. A fall is a generation whose best agent is more than
100 below the best of the previous generation. Updates are the mean per agent; staleness is in updates.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from records import ROOT, evaluated, read_lines

from evorl.runs.configuration import program_for, read_config

LAUNCHER = [
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    str(ROOT / "configs" / "accelerate" / "accelerate.yaml"),
]


def train(config: Path, seed: int, processes: int, overrides: Sequence[str], directory: Path) -> dict[str, Any]:
    """Train one seed; return its outcome, its cost, and the elite's score over 100 fresh episodes.

    Raises RuntimeError if the run fails.
    """
    settings = [f"seed={seed}", f"run.directory={directory}", f"run.name=seed-{seed}", "tracking.backends=[]"]
    launcher = [] if processes == 1 else [*LAUNCHER, "--num_processes", str(processes)]
    program = program_for(read_config(config, overrides))
    command = [sys.executable, *launcher, str(program), "--config", str(config), *overrides, *settings]
    started = time.perf_counter()
    with (directory / f"seed-{seed}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    seconds = time.perf_counter() - started
    run = directory / f"seed-{seed}"
    if code:
        raise RuntimeError(f"{run.name}: exit code {code}: {' | '.join(Path(log.name).read_text().splitlines()[-3:])}")
    summary = json.loads((run / "summary.json").read_text())
    rows = read_lines(run / "metrics.jsonl")
    best = [row["best_fitness"] for row in rows if row["best_fitness"] is not None]
    fresh = evaluated(run, 100)
    return {
        "seed": seed,
        "processes": processes,
        "solved": summary["solved"],
        "seconds": round(seconds, 1),
        "evaluation_seconds": round(sum(row["seconds"].get("evaluation", 0.0) for row in rows), 1),
        "agent_steps": summary["agent_steps"],
        "updates": round(sum(mean(row["updates"]) for row in rows)),
        "staleness": round(mean(row["actors"]["staleness"] for row in rows), 2) if "actors" in rows[0] else None,
        "generations": summary["generations"],
        "falls": sum(after < before - 100 for before, after in pairwise(best)),
        "best": [round(value) for value in best],
        "fresh": {name: round(fresh[name], 1) for name in ("mean", "std", "min")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "training" / "dqn.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parsed = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as directory:
        for seed in parsed.seeds:
            result = train(parsed.config, seed, parsed.processes, parsed.overrides, Path(directory))
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
