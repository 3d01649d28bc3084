"""Measure the peak memory and CPU time of every command that reads a run, for a long run, as a table.

    OMP_NUM_THREADS=1 python benchmarks/experiments/reading.py [--generations 2000] [--agents 64] [--directory DIR] [COMMAND ...]

One generation is trained; its lines are then replaced by those of a simulated tournament, so that the long run has real
agents and a real checkpoint. Memory is the peak resident set size of the command's process, also relative to the same
command on a run of 2 generations of the same agents. CPU time is user plus system time. Without `--directory` the runs
are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evorl.config import read_yaml
from evorl.runs.storage.checkpoint_files import STATE, Checkpoints
from evorl.runs.storage.directory import RunDirectory, load_elite
from evorl.system.files import json_bytes, remove
from evorl.system.formats import encode_agents

ROOT = Path(__file__).parents[2]
STEPS = 2_000
"""Environment steps per agent and generation of a simulated run."""
TRAIN = (
    "evolution.steps=64", "training.max_steps=64", "training.target_fitness=null", "environment=CartPole-v1",
    "environment.num_envs=1", "evaluation.episodes=2", "evaluation.max_steps=20", "tracking.backends=[]",
    "network.hidden_sizes=[16,16]", "algorithm.rollout_steps=64", "algorithm.batch_size=64",
)  # fmt: skip
EVORL = "import sys; from evorl.__main__ import main; sys.exit(main())"
READ = "import evorl, sys; record = evorl.read_run(sys.argv[1])"
COMMANDS: dict[str, tuple[str, ...]] = {
    "list": (EVORL, "list", "{parent}"),
    "clean": (EVORL, "clean", "{run}"),
    "evaluate": (EVORL, "evaluate", "{run}", "--episodes", "1"),
    "lineage": (EVORL, "lineage", "{run}"),
    "lineage --settings": (EVORL, "lineage", "{run}", "--settings"),
    "read_run": (READ, "{run}"),
    "read_run, one metric": (f"{READ}; record.metric('mean_fitness')", "{run}"),
    "read_run, columns of the lineage": (f"{READ}; evorl.columns(record.lineage)", "{run}"),
    "report": (EVORL, "report", "{run}", "--output", "{parent}/report.html"),
    "plot": (EVORL, "plot", "{run}", "--output", "{parent}/plot.png", "--hyperparameter", "learning_rate"),
    "resume": (EVORL, "resume", "{run}", f"training.max_steps={STEPS}"),
    "resume, TensorBoard": (
        EVORL, "resume", "{run}", f"training.max_steps={STEPS}", "tracking.backends=[tensorboard]"
    ),
    "resume, W&B": (EVORL, "resume", "{run}", f"training.max_steps={STEPS}", "tracking.backends=[wandb]"),
}  # fmt: skip


class Cost(NamedTuple):
    """The peak memory in MB and the CPU seconds of a process."""

    memory: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=2_000)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--directory", type=Path, help="keep the runs here, and use those of an earlier call")
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)} (default: all)")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = parsed.directory or Path(folder)
        tiny = made(directory, 2, parsed.agents)
        long = made(directory, parsed.generations, parsed.agents)
        sizes = {name: (long / f"{name}.jsonl").stat().st_size / 1e6 for name in ("metrics", "lineage")}
        with (long / "metrics.jsonl").open("rb") as file:
            line = max(map(len, file)) / 1e6
        print(
            f"{parsed.generations:,} generations of {parsed.agents} agents: metrics {sizes['metrics']:,.0f} MB, "
            f"lineage {sizes['lineage']:,.0f} MB, longest line {line:.2f} MB\n\n"
            "| command | memory, MB | beyond a tiny run, MB | CPU s | of a tiny run | output, MB |\n"
            "|---|---|---|---|---|---|"
        )
        failed = False
        for name in parsed.commands or COMMANDS:
            base, cost = measured(COMMANDS[name], tiny), measured(COMMANDS[name], long)
            failed |= base is None or cost is None
            if base is None or cost is None:
                print(f"| {name} | failed |")
                continue
            written = long.parent / {"report": "report.html", "plot": "plot.png"}.get(name, "none")
            size = f"{written.stat().st_size / 1e6:.1f}" if written.is_file() else ""
            beyond = cost.memory - base.memory
            print(
                f"| {name} | {cost.memory:,.0f} | {beyond:,.0f} | {cost.seconds:.1f} | {base.seconds:.1f} | {size} |",
                flush=True,
            )
    sys.exit(failed)


def measured(command: tuple[str, ...], run: Path) -> Cost | None:
    """Return the cost of a command on a run; if the command fails, print its error and return None."""
    program, *arguments = (part.format(run=run, parent=run.parent) for part in command)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT,
            env={**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            said.seek(0)
            print(said.read()[-1_000:], file=sys.stderr)
            return None
    return Cost(usage.ru_maxrss * 1024 / 1e6, usage.ru_utime + usage.ru_stime)


def made(directory: Path, generations: int, agents: int) -> Path:
    """Return a run with this number of generations, creating it if needed."""
    place = directory / f"{generations}x{agents}"
    run = place / "run"
    if (run / "summary.json").is_file():
        return run
    settings = [f"population.size={agents}", f"run.directory={place}", "run.name=run", *TRAIN]
    subprocess.run([sys.executable, "-m", "evorl", "train", "ppo", *settings], cwd=ROOT, check=True)
    lengthen(run, generations, agents)
    return run


def lengthen(run: Path, generations: int, agents: int) -> None:
    """Extend a run of one generation to many with simulated lines, and adapt its elite and checkpoint."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.long_runs import write_long_run  # type: ignore[import-not-found]

    write_long_run(run, generations, agents, config=read_yaml(run / "config.yaml"))
    best: dict[str, Any] = json.loads((run / "elite" / "agent.json").read_bytes())
    elite = encode_agents([replace(load_elite(run)[1], id=best["id"], fitness=best["fitness"])])
    RunDirectory(run, keep=1).write_elite(elite)
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    payloads = {name: checkpoints.read(1, name) for name in checkpoints.files(1)}
    state = json.loads(payloads[STATE])
    state |= {"generation": generations, "agent_steps": STEPS * generations, "next_id": generations * agents}
    state |= {"global_steps": STEPS * generations * agents}
    state["elite"]["generation"] = best["generation"]
    payloads |= {STATE: json_bytes(state), "elite.safetensors": elite}
    files = {name: checkpoints.write(generations, name, payload) for name, payload in payloads.items()}
    remove(checkpoints.path(1))
    checkpoints.complete(generations, files)


if __name__ == "__main__":
    main()
