"""Count the collectives of a run and the bytes that each rank contributes, for several numbers of ranks, as a table.

    OMP_NUM_THREADS=1 python benchmarks/experiments/collectives.py [--ranks 1 2 4 8] [--config FILE] [key=value ...]

Each number of ranks trains three generations of CartPole with `demos/online.py`. Collectives of the training loop count
towards updates; all others towards generations: metrics, fitness, agents, checkpoints and their digests. Exits with 1
if a run fails or replicas have drifted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from evorl.runs.program import run_program
from evorl.runs.run import Run

ROOT = Path(__file__).parents[2]
DEFAULTS = (
    "environment={id: CartPole-v1, num_envs: 4}", "population.size=4", "network.hidden_sizes=[32, 32]",
    "replay.learning_starts=200", "evolution.steps=2048", "training.max_steps=6144", "training.target_fitness=null",
    "evaluation.episodes=8", "evaluation.max_steps=100", "tracking.backends=[]", "run.timeout=120",
)  # fmt: skip
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--config", default=str(ROOT / "configs" / "training" / "dqn.yaml"))
    parser.add_argument("--counted", type=Path, help=argparse.SUPPRESS)
    parsed, overrides = parser.parse_known_args()
    if parsed.counted:
        count(parsed.counted, ["--config", parsed.config, *overrides])
        return
    print("| ranks | updates | collectives for an update | bytes | others in a generation | bytes |")
    print("|---|---|---|---|---|---|")
    sys.exit(max([launched(ranks, parsed.config, overrides) for ranks in parsed.ranks]))


def launched(ranks: int, config: str, overrides: Sequence[str]) -> int:
    """Train with `ranks` ranks and print a row of the table; return 1 on a failure or drift, else 0."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "counted.json")
        accelerate = ["accelerate.commands.launch", "--config_file", str(ROOT / "configs/accelerate/accelerate.yaml")]
        program = [str(Path(__file__)), "--counted", str(file), "--config", config, *DEFAULTS, *overrides]
        where = [f"run.directory={directory}", "run.name=a"]
        command = [sys.executable, "-m", *accelerate, "--num_processes", str(ranks), *program, *where]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            return 1
        rows = [json.loads(line) for line in Path(directory, "a", "metrics.jsonl").read_text().splitlines()]
        counted = json.loads(file.read_text())
    updates, generations = int(sum(row["updates"][0] for row in rows)), len(rows)
    row = (
        ranks,
        updates,
        f"{counted['update calls'] / updates:.2f}",
        f"{counted['update bytes'] / updates:,.0f}",
        f"{counted['generation calls'] / generations:.1f}",
        f"{counted['generation bytes'] / generations:,.0f}",
    )
    print("|" + "|".join(f" {value} " for value in row) + "|", flush=True)
    return int(any(row["drifts"] for row in rows) or generations != 3)


def count(file: Path, arguments: Sequence[str]) -> None:
    """Train as this rank with instrumented collectives; rank 0 writes the counts to `file`."""
    counts: Counter[str] = Counter()
    inside = False

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            where = "update" if inside else "generation"
            tensors = [each for each in given if isinstance(each, Tensor)]
            counts[f"{where} calls"] += 1
            counts[f"{where} bytes"] += sum(each.nbytes for each in tensors)
            return call(*given, **options)

        return counted

    def marked(run: Run, steps: Callable[[Run], Iterator[int]] = Run.steps) -> Iterator[int]:
        nonlocal inside
        inside = True
        yield from steps(run)
        inside = False

    for name in COLLECTIVES:
        setattr(dist, name, counting(getattr(dist, name)))
    Run.steps = marked  # type: ignore[method-assign, assignment]
    spec = importlib.util.spec_from_file_location("online", ROOT / "demos" / "online.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    status = 1
    with contextlib.suppress(SystemExit):
        status = run_program(demo.main, list(arguments))
    if status == 0 and os.environ.get("RANK", "0") == "0":
        kinds = [f"{where} {what}" for where in ("update", "generation") for what in ("calls", "bytes")]
        file.write_text(json.dumps({kind: counts[kind] for kind in kinds}))
    sys.exit(status)


if __name__ == "__main__":
    main()
