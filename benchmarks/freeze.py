"""Fingerprint the results of training: run this before and after a change that should not alter any number.

    OMP_NUM_THREADS=1 python benchmarks/freeze.py [--output freeze.txt] [--jobs 2] [CONFIGURATION ...]

Every shipped configuration trains for two short generations: on one rank, and on two ranks with replicated and sharded
agents where supported. Actors run in lockstep, since their order is not reproducible otherwise. Each output line has
digests of the agents (parameters, Adam's moments, target networks), the stored experience, the lineage, and the metrics
without times. The same revision gives the same lines on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from records import run as launch
from safetensors.numpy import load_file

from evorl.config.yaml import shipped_names
from evorl.runs.launch import load_config
from evorl.runs.program import Parser, run_program

CONFIGS = Path(__file__).parent.parent / "configs" / "training"
TIMES = ("wall_clock_seconds", "env_steps_per_second", "updates_per_second", "seconds", "made_with", "actors")
"""Excluded metrics: times, speeds, machine details, and statistics of actors."""
LIMIT = 300
"""The time limit of a run in seconds."""
Layout = tuple[int, str]
ALONE: Layout = (1, "replicated")


def short_run(name: str) -> list[str]:
    """Return the overrides that shorten a shipped configuration to two short generations."""
    config = load_config([], CONFIGS / f"{name}.yaml")
    rollout = getattr(config.algorithm, "rollout_steps", 0) * config.environment.num_envs
    steps = max(1024, 2 * rollout)
    settings = [f"evolution.steps={steps}", f"training.max_steps={2 * steps}", "training.target_fitness=null"]
    settings += ["evaluation.episodes=2", "evaluation.confirmation_episodes=2", "evaluation.max_steps=200"]
    settings += ["tracking.backends=[]", "run.timeout=100"]
    if config.algorithm.replayed:
        settings += ["replay.learning_starts=300", "replay.capacity=4000"]
    if config.actors is not None:
        settings.append("actors.lockstep=true")
    return settings


def layouts(name: str) -> list[Layout]:
    """Return the pairs of number of ranks and placement that a configuration supports."""
    config = load_config([], CONFIGS / f"{name}.yaml")
    both: list[Layout] = [(2, "replicated"), (2, "sharded")]
    return [ALONE, *(both if config.population.placement == "replicated" else both[1:])]


def fingerprint(folder: Path, name: str, layout: Layout) -> str:
    """Train a configuration in a layout and return its output line, or the last error lines if it fails."""
    ranks, placement = layout
    case = f"{name} {ranks} {placement}"
    run = folder / case.replace(" ", "-")
    command = [sys.executable, "-m", "evorl", "train", name, "--processes", str(ranks), f"run.directory={folder}"]
    command += [f"run.name={run.name}", f"population.placement={placement}", *short_run(name)]
    code, output = launch(command, LIMIT)
    if code == 124:
        return f"{case} failed: no end within {LIMIT} s"
    if code:
        return f"{case} failed with {code}: {' | '.join(output.strip().splitlines()[-3:])}"
    checkpoint = max((run / "checkpoints").glob("generation-*"))
    agents = tensors([checkpoint / "agents.safetensors"])
    experience = tensors(sorted(checkpoint.glob("experience-rank-*.safetensors")))
    lineage, metrics = (rows(run / file) for file in ("lineage.jsonl", "metrics.jsonl"))
    return f"{case} agents={agents} experience={experience} lineage={lineage} metrics={metrics}"


def tensors(paths: Iterable[Path]) -> str:
    """Return a digest of all tensors in the files but counters, sorted by name within each file."""
    state = hashlib.sha256()
    for path in paths:
        for name, value in sorted(load_file(path).items()):
            if value.ndim:
                state.update(f"{name} {value.dtype} {value.shape}".encode())
                state.update(value.tobytes())
    return state.hexdigest()[:12]


def rows(path: Path) -> str:
    """Return a digest of a JSON Lines file without the keys in `TIMES`."""
    state = hashlib.sha256()
    for line in path.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = {key: value for key, value in json.loads(line).items() if key not in TIMES}
        state.update(json.dumps(row, sort_keys=True).encode())
    return state.hexdigest()[:12]


def main(arguments: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", default=shipped_names())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parsed = parser.parse_args(arguments)
    cases = [(name, layout) for name in parsed.configurations for layout in layouts(name)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(parsed.jobs) as pool:
        lines = list(pool.map(lambda case: fingerprint(Path(folder), *case), cases))
    print("\n".join(lines))
    if parsed.output is not None:
        parsed.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
