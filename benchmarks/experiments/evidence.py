"""Train the arms of the protocols in docs/protocols.md, and append one JSON line per run.

    python benchmarks/experiments/evidence.py --runs runs/evidence [--plan selection] [--until 18:30]
    python benchmarks/experiments/evidence.py --runs runs/evidence --data FILE --jobs lunar_lander-{burn_in,pool}-{9,10,11}

Runs that have a line are not repeated, so the benchmark can be stopped and restarted at any time; several processes of
one machine can work on a plan side by side. Each run is a separate process of `demos/online.py` with one thread. Its
best agent is scored on fresh episodes, and so are all agents of a pool. With the plans `selection` and `wide` the run's
lineage is kept beside the data.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from evorl.algorithms import make_algorithm
from evorl.config import read_yaml, validate
from evorl.envs import Environments
from evorl.envs.vector import for_evaluation
from evorl.population import Policy
from evorl.population.evaluation import evaluate
from evorl.runs.storage.checkpoint_files import Checkpoints
from evorl.system.formats import decode_agents
from evorl.system.processes import cpu

sys.path.append(str(Path(__file__).parents[1]))
from records import DATA, ROOT, append, claimed, evaluated, read_lines, revision

PROGRAM = ROOT / "demos" / "online.py"
HELD_OUT = 100
"""The number of fresh episodes on which the final agent of a run is scored."""
MEMBER_EPISODES = 20
"""The number of fresh episodes per agent of a pool; few, since pool statistics are means over many agents."""


@dataclass(frozen=True)
class Task:
    """An environment: its configuration file, and the overrides common to all arms."""

    config: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """An experimental arm: its overrides and its number of seeds."""

    settings: tuple[str, ...]
    seeds: int
    scores_members: bool = False


SHARED = (
    "population.size=16",
    "training.target_fitness=null",
    "tracking.backends=[]",
    "run.threads=1",
    "checkpoint.keep=1",
    "evaluation.episodes=5",
    "evaluation.confirmation_episodes=20",
    "evolution.initial=sampled",
    "evolution.selection.archive=1000",
    "evolution.selection.replace=1",
    "evolution.burn_in=0",
    "evolution.architecture.min_units=32",
    "evolution.architecture.max_units=128",
)
SEARCHED = ("learning_rate", "entropy_coefficient", "clip", "batch_size", "gamma", "gae_lambda", "epochs")
LEARNING_RATE = "{min: 1e-4, max: 1e-2, grow: 2, resample: 0.25}"
RANGES = (
    f"evolution.hyperparameters.learning_rate={LEARNING_RATE}",
    "evolution.hyperparameters.entropy_coefficient={min: 1e-3, max: 3e-2, grow: 2, resample: 0.25}",
    "evolution.hyperparameters.clip={min: 0.1, max: 0.4, grow: 1.2, resample: 0.25}",
    "evolution.hyperparameters.batch_size={min: 128, max: 512, grow: 2, resample: 0.25}",
)


def wide_ranges(**others: str) -> str:
    """Override the ranges of seven hyperparameters by those of a user without knowledge, except for `others`."""
    limits = {
        "learning_rate": "min: 1e-5, max: 1e-1",
        "gamma": "min: 0.9, max: 0.9999",
        "gae_lambda": "min: 0.8, max: 0.999",
        "entropy_coefficient": "min: 1e-5, max: 1e-1",
        "clip": "min: 0.05, max: 0.8",
        "epochs": "min: 1, max: 16",
        "batch_size": "min: 128, max: 1024",
    }
    ranges = [
        f"{name}: {{{limit}, grow: {1.5 if name == 'clip' else 2}, resample: 0.25}}"
        for name, limit in (limits | others).items()
    ]
    return f"evolution.hyperparameters={{{', '.join(ranges)}}}"


WIDE = wide_ranges()
WIDER = wide_ranges(
    learning_rate="min: 1e-7, max: 1", gamma="min: 0.5, max: 0.9999", entropy_coefficient="min: 1e-5, max: 1"
)
"""The ranges of Acrobot's main runs, since a sixth of the trials succeed within `WIDE`."""
LESS_WIDE = wide_ranges(
    learning_rate="min: 1e-4, max: 1e-1", gamma="min: 0.95, max: 0.9999", gae_lambda="min: 0.9, max: 0.999"
)
"""The ranges of LunarLander's main runs, since no trials succeed within `WIDE`."""
TASKS = {
    "cartpole": Task(
        "ppo.yaml",
        (
            *RANGES,
            "environment.id=CartPole-v1",
            "algorithm.rollout_steps=128",
            "evolution.steps=3072",
            "training.max_steps=30720",
        ),
    ),
    "acrobot": Task(
        "ppo.yaml", (*RANGES, "environment.id=Acrobot-v1", "evolution.steps=4096", "training.max_steps=40960")
    ),
    "lunar_lander": Task("ppo.yaml", (*RANGES, "evolution.steps=8192", "training.max_steps=98304")),
    "acrobot_wide": Task(
        "ppo.yaml", (WIDE, "environment.id=Acrobot-v1", "evolution.steps=4096", "training.max_steps=40960")
    ),
    "acrobot_wider": Task(
        "ppo.yaml", (WIDER, "environment.id=Acrobot-v1", "evolution.steps=4096", "training.max_steps=40960")
    ),
    "lunar_lander_wide": Task("ppo.yaml", (WIDE, "evolution.steps=8192", "training.max_steps=98304")),
    "lunar_lander_less_wide": Task("ppo.yaml", (LESS_WIDE, "evolution.steps=8192", "training.max_steps=98304")),
    "cartpole_dqn": Task(
        "dqn.yaml",
        (
            f"evolution.hyperparameters={{learning_rate: {LEARNING_RATE}}}",
            "environment.id=CartPole-v1",
            "evolution.steps=3000",
            "training.max_steps=30000",
        ),
    ),
}


def mutations(**weights: float) -> str:
    """Return the override of the mutation weights; those not given are zero."""
    kinds = ("none", "architecture", "parameters", "activation", "hyperparameters")
    return "evolution.mutation={" + ", ".join(f"{kind}: {weights.get(kind, 0)}" for kind in kinds) + "}"


NO_SELECTION = "evolution.selection.name=none"
AS_SHIPPED = ("evolution.initial=configured", "algorithm.learning_rate=5e-4")
"""The values in ppo.yaml when the protocol was fixed."""
LOW = (
    "evolution.initial=configured",
    "algorithm.learning_rate=5e-5",
    "evolution.hyperparameters.learning_rate={min: 1e-5, max: 1e-2, grow: 2, resample: 0.25}",
)
OF_PPO_YAML = mutations(none=0.5, architecture=0.1, parameters=0.1, hyperparameters=0.3)
SMALL_MOVES = (
    "evolution.hyperparameters.learning_rate={min: 1e-5, max: 1e-2, grow: 1.2, resample: 0}",
    "evolution.hyperparameters.entropy_coefficient={min: 1e-3, max: 3e-2, grow: 1.2, resample: 0}",
    "evolution.hyperparameters.clip={min: 0.1, max: 0.4, grow: 1.2, resample: 0}",
    "evolution.hyperparameters.batch_size={min: 128, max: 512, grow: 1.2, resample: 0}",
)
ARMS = {
    "full": Arm((mutations(none=0.2, architecture=0.2, parameters=0.2, hyperparameters=0.4),), seeds=8),
    "hyperparameters": Arm((mutations(none=0.2, hyperparameters=0.8),), seeds=8),
    "selection": Arm((mutations(none=1),), seeds=8),
    "pool": Arm((mutations(none=1), NO_SELECTION), seeds=6, scores_members=True),
    "shipped": Arm((mutations(none=1), NO_SELECTION, *AS_SHIPPED), seeds=6, scores_members=True),
    "burn_in": Arm((mutations(none=0.2, hyperparameters=0.8), "evolution.burn_in=4"), seeds=8),
    "low": Arm((mutations(none=0.2, hyperparameters=0.8), *LOW), seeds=8),
    "low_pool": Arm((mutations(none=1), NO_SELECTION, *LOW), seeds=8),
    "low_small_moves": Arm((OF_PPO_YAML, *LOW, *SMALL_MOVES), seeds=6),
    "low_rare_moves": Arm((OF_PPO_YAML, *LOW), seeds=6),
    # The arms of docs/protocols.md beside `pool` and `selection`.
    "pbt": Arm((mutations(hyperparameters=1), "evolution.selection.replace=0.25"), seeds=40),
    "pbt_late": Arm(
        (mutations(hyperparameters=1), "evolution.selection.replace=0.25", "evolution.burn_in=auto"), seeds=40
    ),
}
PRIMARY = ("full", "hyperparameters", "selection", "pool", "shipped")
Job = tuple[str, str, int]
"""The names of a task and of an arm, and a seed."""


def evidence_plan() -> Iterator[Job]:
    """The runs of docs/evidence.md, seed by seed over all arms, so that the data are balanced at any time."""
    most = max(arm.seeds for arm in ARMS.values())
    stages = [
        [("cartpole", arm) for arm in ("low", "low_pool", "low_small_moves", "low_rare_moves")],
        [(task, arm) for task in ("cartpole", "acrobot") for arm in PRIMARY],
        [("lunar_lander", arm) for arm in PRIMARY],
        [("lunar_lander", "burn_in")],
        [("cartpole_dqn", arm) for arm in ("hyperparameters", "selection", "pool")],
    ]
    for stage in stages:
        for seed in range(1, most + 1):
            for task, arm in stage:
                if seed <= (min(6, ARMS[arm].seeds) if task == "cartpole_dqn" else ARMS[arm].seeds):
                    yield task, arm, seed


def selection_plan() -> Iterator[Job]:
    """The runs of docs/protocols.md: the arms of the first comparison, then of the second; one half after the other."""
    for first in (101, 121):
        for arms in (("pool", "selection"), ("pbt_late",), ("pbt",)):
            for seed in range(first, first + 20):
                yield from (("lunar_lander", arm, seed) for arm in arms)


def wide_plan() -> Iterator[Job]:
    """The runs of docs/protocols.md's second part: the pilots' pools, then pairs of both arms on both tasks."""
    for seed in range(201, 206):
        yield from ((task, "pool", seed) for task in ("acrobot_wide", "lunar_lander_wide"))
    for seed in range(206, 211):
        yield from ((task, "pool", seed) for task in ("acrobot_wider", "lunar_lander_less_wide"))
    for seed in range(301, 341):
        yield from (
            (task, arm, seed) for task in ("acrobot_wider", "lunar_lander_less_wide") for arm in ("pool", "pbt_late")
        )


PLANS = {"evidence": evidence_plan, "selection": selection_plan, "wide": wide_plan}


def job_of(name: str) -> Job:
    """Parse a run's name TASK-ARM-SEED."""
    task, arm, seed = name.split("-")
    return task, arm, int(seed)


def train(job: Job, directory: Path) -> dict[str, Any]:
    """Train one run and return its line: provenance, cost, learning curves and held-out scores."""
    task, arm, seed = job
    name = f"{task}-{arm}-{seed}"
    run = directory / name
    shutil.rmtree(run, ignore_errors=True)
    place = (f"seed={seed}", f"run.directory={directory}", f"run.name={name}")
    settings = (*SHARED, *TASKS[task].settings, *ARMS[arm].settings, *place)
    config = ROOT / "configs" / "training" / TASKS[task].config
    code, started = revision(), time.perf_counter()
    with (directory / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--config", str(config), *settings], stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}; see {log.name}")
    rows = read_lines(run / "metrics.jsonl")
    line = {
        "task": task,
        "arm": arm,
        "seed": seed,
        "revision": code,
        "machine": cpu(),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "seconds": round(time.perf_counter() - started, 1),
        **course(rows),
        "updates": [round(sum(row["updates"])) for row in rows],
        "births": births(read_lines(run / "lineage.jsonl")),
        "winner": json.loads((run / "elite" / "agent.json").read_text())["hyperparameters"],
        "held_out": evaluated(run, HELD_OUT, seed),
    }
    if ARMS[arm].scores_members:
        line["fitness"] = [[rounded(value) for value in row["fitness"]] for row in rows]
        line["members"] = score_members(run, seed)
        line["members_hyperparameters"] = [
            {key: float(f"{value:.4g}") for key, value in one.items()} for one in rows[-1]["hyperparameters"]
        ]
    return line


def short_lineage(job: Job, directory: Path) -> list[dict[str, Any]]:
    """What a run's lineage says of each agent and generation, in short."""
    task, arm, seed = job
    return [
        {
            "task": task,
            "arm": arm,
            "seed": seed,
            "generation": row["generation"],
            "id": row["id"],
            "parent": row["parent"],
            "fitness": None if row["fitness"] is None else rounded(row["fitness"]),
            "mutation": row["mutation"]["target"] or row["mutation"]["kind"],
            **{key: float(f"{value:.4g}") for key, value in row["hyperparameters"].items() if key in SEARCHED},
        }
        for row in read_lines(directory / f"{task}-{arm}-{seed}" / "lineage.jsonl")
    ]


def course(rows: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return the learning curves of a run, with one value per generation.

    `steps` and `evaluation_steps` are cumulative over all agents. `incumbent` is the run's own estimate of the mean
    return of its current elite, over the at most 20 episodes that confirmed it.
    """
    evaluated = 0
    result: dict[str, list[float | None]] = defaultdict(list)
    for row in rows:
        evaluated += row["evaluation_steps"]
        result["steps"].append(row["global_steps"])
        result["evaluation_steps"].append(evaluated)
        result["incumbent"].append(rounded(row["elite_fitness"]))
        result["best"].append(rounded(row["best_fitness"]))
        result["mean"].append(rounded(row["mean_fitness"]))
    return dict(result)


def births(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return for each kind of mutation the number of children, and the mean fraction of their generation they beat.

    Ties count half. Initial agents, unchanged survivors and copies from the archive do not count.
    """
    generations: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        generations[line["generation"]][line["id"]] = line
    shares: dict[str, list[float]] = defaultdict(list)
    for number, agents in generations.items():
        known = [agent["fitness"] for agent in agents.values() if agent["fitness"] is not None]
        for id, agent in agents.items():
            before = generations.get(number - 1)
            copied = agent["mutation"]["target"] == "archive"
            if before is None or id in before or copied or agent["fitness"] is None:
                continue
            beaten = sum((agent["fitness"] > other) + 0.5 * (agent["fitness"] == other) for other in known) - 0.5
            shares[agent["mutation"]["kind"]].append(beaten / max(1, len(known) - 1))
    return {kind: [len(values), round(sum(values) / len(values), 4)] for kind, values in shares.items()}


def score_members(run: Path, seed: int) -> list[float]:
    """Return the mean return of each agent of the last generation on fresh episodes, with the same seeds for all."""
    config = validate(read_yaml(run / "config.yaml"))
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    last = checkpoints.generations()[-1]
    agents = decode_agents(checkpoints.read(last, "agents.safetensors"), "the checkpoint")
    environments = Environments(for_evaluation(config.environment), len(agents), MEMBER_EPISODES, whole_games=True)
    policy = Policy(agents, make_algorithm(config, environments.interface), torch.Generator())
    # Environments take seeds of 31 bits, so these may be those of other episodes; the held-out ones are not.
    seeds = [10_000 * seed + episode for episode in range(MEMBER_EPISODES)]
    returns = evaluate(policy, environments, seeds, config.evaluation.max_steps).returns
    environments.close()
    return [rounded(value) for value in returns.mean(1)]


def rounded(value: float) -> float:
    return round(float(value), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="where runs are written")
    parser.add_argument("--plan", choices=PLANS, default="evidence")
    parser.add_argument("--data", type=Path, help="the file of results; default: benchmarks/data/PLAN.jsonl.gz")
    parser.add_argument("--jobs", nargs="+", metavar="TASK-ARM-SEED", help="the runs, in place of the protocol's")
    parser.add_argument("--until", help="begin no run after this time of day, as HH:MM")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    parsed.runs.mkdir(parents=True, exist_ok=True)
    data = parsed.data or DATA / f"{parsed.plan}.jsonl.gz"
    jobs = list(map(job_of, parsed.jobs) if parsed.jobs else PLANS[parsed.plan]())
    for job in jobs:
        if parsed.until and datetime.now().strftime("%H:%M") >= parsed.until:
            break
        with claimed(job, parsed.runs) as is_free:
            done = {(line["task"], line["arm"], line["seed"]) for line in read_lines(data)}
            if is_free and job not in done:
                append(data, line := train(job, parsed.runs))
                if parsed.plan != "evidence":
                    append(DATA / f"{parsed.plan}_lineages.jsonl.gz", *short_lineage(job, parsed.runs))
                print(*job, line["held_out"]["mean"], line["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()
