"""Measure the time to solve LunarLander with this trainer and its peers; append one JSON line per run.

    python benchmarks/experiments/time_to_target.py --peers V/bin/python --runs runs/time [--data FILE]

Each run is a separate command on one core with one thread, timed from its start. Two runs execute at a time, on two
cores. Each system uses its shipped settings and trains until an agent's mean return of 200 is confirmed on fresh
episodes, or for at most 15 minutes. The agent is then scored over about 100 further episodes. If a peer fails, its line
has the error. Runs that have a line are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from evorl.system.processes import cpu

sys.path.append(str(Path(__file__).parents[1]))
from records import DATA, ROOT, append, read_lines, revision

LINES = DATA / "time_to_target.jsonl.gz"
HELD_OUT_SEED = 2**40
"""Added to a run's seed, so that its test episodes have seeds that no other episodes have."""
PEERS = {
    "agilerl": ("agilerl_to_target.py",),
    "agilerl_same_networks": ("agilerl_to_target.py", "--architecture", "0"),
    "sb3": ("sb3_to_target.py",),
}
"""The script and arguments of each peer."""
SYSTEMS = ("evorl", *PEERS)


def evorl(seed: int, seconds: float, runs: Path, environment: Mapping[str, str], core: int) -> dict[str, Any]:
    """Run `evorl train ppo` with one seed and return its line. Raises RuntimeError if it fails."""
    name = f"seed-{seed}"
    settings = [f"seed={seed}", f"run.directory={runs}", "training.target_fitness=200", "training.max_steps=10000000"]
    command = [sys.executable, "-m", "evorl", "train", "ppo", "--name", name, "tracking.backends=[]", *settings]
    # A run of this name would be refused, and its old summary read.
    shutil.rmtree(runs / name, ignore_errors=True)
    started = time.perf_counter()
    with (runs / f"{name}.log").open("w") as log:
        process = subprocess.Popen(on(core, command), stdout=log, stderr=log, env=environment, cwd=ROOT)
        try:
            if code := process.wait(seconds):
                raise RuntimeError(f"{name}: exit code {code}; see {log.name}")
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
    took = time.perf_counter() - started
    summary = json.loads((runs / name / "summary.json").read_text())
    arguments = ["evaluate", str(runs / name), "--episodes", "100", "--seed", str(HELD_OUT_SEED + seed), "--json"]
    said = subprocess.check_output(on(core, [sys.executable, "-m", "evorl", *arguments]), env=environment, cwd=ROOT)
    return {
        "system": "evorl",
        "seed": seed,
        "reached": summary["solved"],
        "seconds": round(took, 1),
        "steps": summary["global_steps"],
        "score": round(json.loads(said)["mean"], 1),
    }


def peer(
    system: str, seed: int, seconds: float, runs: Path, python: Path, environment: Mapping[str, str], core: int
) -> dict[str, Any]:
    """Run a peer's script and return its line, with the seed."""
    script, *arguments = PEERS[system]
    program = str(ROOT / "benchmarks" / "experiments" / "baselines" / script)
    command = on(core, [str(python), program, "--seed", str(seed), "--seconds", str(seconds), *arguments])
    return {"system": system, "seed": seed, **run_peer(command, runs / f"{system}-{seed}.log", environment)}


def run_peer(command: list[str], log: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a peer and return the line that it prints, or a line with its time and error if it fails."""
    started = time.perf_counter()
    with log.open("w+") as file:
        ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=file)
        took = time.perf_counter() - started
        file.seek(0)
        errors = file.read().splitlines()
    if ended.returncode:
        error = errors[-1] if errors else f"exit code {ended.returncode}"
        return {"reached": False, "seconds": round(took, 1), "error": error}
    line: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return line


def on(core: int, command: list[str]) -> list[str]:
    return ["taskset", "-c", str(core), *command]


def jobs(seeds: int, done: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the missing runs with systems in turns, so that changes in the machine's speed affect all of them."""
    for seed in range(1, seeds + 1):
        yield from ((system, seed) for system in SYSTEMS if (system, seed) not in done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="Python of the peers' environment")
    parser.add_argument("--runs", type=Path, required=True, help="where runs are written")
    parser.add_argument("--data", type=Path, default=LINES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=900.0, help="the longest time of a run")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], help="a run at a time on each")
    parsed = parser.parse_args()
    parsed.runs.mkdir(parents=True, exist_ok=True)
    done = {(line["system"], line["seed"]) for line in read_lines(parsed.data)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    cores: SimpleQueue[int] = SimpleQueue()
    for core in parsed.cores:
        cores.put(core)

    def run(job: tuple[str, int]) -> None:
        system, seed = job
        core, code = cores.get(), revision()
        try:
            if system == "evorl":
                line = evorl(seed, parsed.seconds, parsed.runs.resolve(), environment, core)
            else:
                line = peer(system, seed, parsed.seconds, parsed.runs, parsed.peers, environment, core)
        finally:
            cores.put(core)
        append(parsed.data, line := {**line, "revision": code, "machine": cpu()})
        print(json.dumps(line), flush=True)

    with ThreadPoolExecutor(len(parsed.cores)) as pool:
        list(pool.map(run, jobs(parsed.seeds, done)))


if __name__ == "__main__":
    main()
