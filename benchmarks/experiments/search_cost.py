"""Measure the minutes from unknown settings until LunarLander is solved; append one JSON line per run.

    python benchmarks/experiments/search_cost.py --peers V/bin/python --runs runs/search [--systems evorl sb3_optuna] [--data FILE]

LunarLander-v3 on two cores, nothing else running, one run at a time, systems in turns. Four settings of PPO are
unknown: learning rate (1e-4 to 1e-2), entropy coefficient, clip and batch size, with the ranges of ppo.yaml. `evorl`
evolves 16 agents with sampled settings, and `pool` trains them without selection; both stop by their own rule,
are scored by benchmarks/experiments/baselines/landing.py, and go on with a target 10 higher where that mean is below 200. The peers
are in benchmarks/experiments/baselines/sb3_search.py. The clock runs from the start of a command until that script confirms a mean
of 200, at most 20 minutes. Runs that have a line are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from baselines import landing

import evorl
from evorl.runs.reading.loaded import LoadedAgent
from evorl.system.processes import cpu

sys.path.append(str(Path(__file__).parents[1]))
from records import DATA, ROOT, append, read_lines, revision

LINES = DATA / "search_cost.jsonl.gz"
PROCESSES = 2
OURS = {"evorl": (), "pool": ("evolution.selection.name=none",)}
PEERS = ("optuna", "tune", "tuned", "evorl")
SEEDS = {"evorl": 5, "pool": 5, **{f"sb3_{way}": 3 for way in PEERS}}
"""The runs of each system."""
STEP = 10.0
"""By how much the target rises after a stop whose mean is below 200."""


def train(system: str, seed: int, seconds: float, runs: Path) -> dict[str, Any]:
    """Train 16 agents until one lands, and return the line of the run. Raises RuntimeError if training fails."""
    started, name = time.perf_counter(), f"{system}-{seed}"
    target, score, steps = landing.TARGET, None, 0
    # One that was interrupted would be resumed, and its time before would not count.
    shutil.rmtree(runs / name, ignore_errors=True)
    while (left := seconds - (time.perf_counter() - started)) > 0:
        settings = (
            "population.size=16", "evolution.initial=sampled", "training.max_steps=100000000",
            f"training.target_fitness={target}", f"seed={seed}", f"run.directory={runs}", f"run.name={name}",
            "run.resume=auto", *OURS[system],
        )  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "evorl",
            "train",
            "ppo",
            "--processes",
            str(PROCESSES),
            "--no-track",
            *settings,
        ]
        with (runs / f"{name}.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
            try:
                if code := process.wait(left):
                    raise RuntimeError(f"{name}: exit code {code}; see {log.name}")
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(60)
        summary = json.loads((runs / name / "summary.json").read_text())
        steps = summary["global_steps"]
        if not summary["solved"]:
            break
        mean = landing.mean_return(actions_of(evorl.load(runs / name)), seed)
        if mean >= landing.TARGET:
            score = mean
            break
        target += STEP
    took = round(time.perf_counter() - started, 1)
    return {"reached": score is not None, "seconds": took, "steps": steps, "score": score}


def run_peer(command: list[str], log: Path) -> dict[str, Any]:
    """Run a peer and return the line that it prints, or a line with its time and error if it fails."""
    started = time.perf_counter()
    with log.open("w+") as file:
        ended = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=file)
        took = time.perf_counter() - started
        file.seek(0)
        errors = file.read().splitlines()
    if ended.returncode:
        error = errors[-1] if errors else f"exit code {ended.returncode}"
        return {"reached": False, "seconds": round(took, 1), "error": error}
    line: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return line


def actions_of(agent: LoadedAgent) -> Callable[[np.ndarray], Any]:
    """The actions of an agent that does not explore."""
    return lambda observation: agent.predict(observation)[0]


def missing(systems: list[str], done: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the runs without a line, systems in turns, so that changes in the machine's speed affect all of them."""
    for seed in range(1, 1 + max(SEEDS.values())):
        yield from ((name, seed) for name in systems if seed <= SEEDS[name] and (name, seed) not in done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="Python of the peers' environment (see their script)")
    parser.add_argument("--runs", type=Path, required=True, help="where runs are written")
    parser.add_argument("--systems", nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--data", type=Path, default=LINES)
    parser.add_argument("--seconds", type=float, default=1200.0, help="the longest time of a run")
    parsed = parser.parse_args()
    runs = parsed.runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    done = {(line["system"], line["seed"]) for line in read_lines(parsed.data)}
    os.environ["OMP_NUM_THREADS"] = "1"
    for system, seed in missing(parsed.systems, done):
        code = revision()
        if system in OURS:
            line = train(system, seed, parsed.seconds, runs)
        else:
            script = ROOT / "benchmarks" / "experiments" / "baselines" / "sb3_search.py"
            arguments = [system.removeprefix("sb3_"), "--seed", str(seed), "--seconds", str(parsed.seconds)]
            line = run_peer([str(parsed.peers), str(script), *arguments], runs / f"{system}-{seed}.log")
        line = {"system": system, "seed": seed, "revision": code, "machine": cpu(), **line}
        append(parsed.data, line)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
