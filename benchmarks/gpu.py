"""Check training on a GPU in one command of about ten minutes; without a GPU, run the same checks at small sizes.

    python benchmarks/gpu.py [--output gpu.json] [--parts train losses cost launches pong] [--jobs 5]

The parts run in separate processes, so that a failure does not affect the others:

- `train`: every shipped configuration for two short generations; three of them also on two ranks (NCCL if there are two
  GPUs, otherwise gloo, on the CPU), and again with the same seed. Reports exit codes, the last lines of failures,
  whether all losses are finite, and whether repeated runs are identical.
- `losses`: the same 18 updates of the same agents on the CPU and on the GPU, for every algorithm whose batches can be
  recorded in this process. Reports the largest relative difference of the logged losses (of the first and the last
  update for off-policy algorithms, of three for PPO, of all for A2C), and the largest difference of the parameters.
  Losses that draw random numbers are marked, since each device has its own generator.
- `cost`: milliseconds per update and per action step for populations of 1 to 256, with vector and image observations.
- `launches`: kernels, copies and fills of an eager update of four agents, its wall-clock time, and the time that the
  GPU takes for them. Reports also the time of a CUDA graph of the whole update, which training does not use: what could
  be gained at most.
- `pong`: PPO on Pong for three minutes. Reports environment steps per second of all agents, and the training return.

Results are written to a JSON file as they arrive, and each part's table is printed when it ends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import run
from throughput import Trainer

from evorl.algorithms import Algorithm, make_algorithm
from evorl.config.yaml import shipped_names
from evorl.population import Learner, Policy, initial_population
from evorl.runs.launch import load_config
from evorl.runs.program import Parser, run_program
from evorl.seeding import torch_generator
from evorl.types.agents import Agent
from evorl.types.batches import Batch

CONFIGS = Path(__file__).parent.parent / "configs" / "training"
PARTS = ("train", "losses", "cost", "launches", "pong")
TWICE = ("dqn", "ppo", "ppo_atari")
"""Configurations that are also repeated with the same seed, and run on two ranks."""
COSTS = {
    "dqn, vectors": ("dqn", ("network.hidden_sizes=[32,32]", "algorithm.batch_size=128", "replay.learning_starts=256")),
    "dqn, two layers of 256": (
        "dqn", ("network.hidden_sizes=[256,256]", "algorithm.batch_size=256", "replay.learning_starts=256")
    ),
    "dqn, images": ("dqn_atari", ("replay.learning_starts=256", "replay.capacity=2000", "environment.num_envs=2")),
}  # fmt: skip
LAUNCHED = ("dqn", "ppo_atari")
SMALL_REPLAY = ("environment.num_envs=2", "replay.learning_starts=300", "replay.capacity=4000")
UPDATES = 18
Row = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--configurations", nargs="+", default=shipped_names())
    parser.add_argument("--jobs", type=int, default=5 if torch.cuda.is_available() else 2)
    parser.add_argument("--pong-seconds", type=float, default=180.0 if torch.cuda.is_available() else 20.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=None)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    sizes = parsed.sizes or ([1, 4, 16, 64, 256] if torch.cuda.is_available() else [1, 4])
    if parsed.one is not None:
        part, _, name = parsed.one.partition(":")
        cases = {"losses": losses, "cost": lambda name: cost(name, sizes), "launches": launches}
        found = cases[part](name)
        print(json.dumps(found))
        return
    record: Row = {"machine": machine(), "results": {}}
    for part in parsed.parts:
        began = time.perf_counter()
        record["results"][part] = run_part(part, parsed.configurations, sizes, parsed.jobs, parsed.pong_seconds)
        record["results"][part + "_seconds"] = round(time.perf_counter() - began)
        parsed.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(table(part, record["results"][part]), flush=True)


def machine() -> Row:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": gpus, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def run_part(part: str, names: Sequence[str], sizes: Sequence[int], jobs: int, seconds: float) -> list[Row]:
    """Run the processes of a part, in parallel if they do not measure time."""
    if part == "train":
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
            chosen = [name for name in TWICE if name in names]
            cases = [(name, 1, "") for name in names] + [(name, 1, "-again") for name in chosen]
            cases += [(name, 2, "-ranks") for name in chosen]
            # Loaded here, since threads would import Gymnasium's modules concurrently, which can fail.
            settings = {name: short_run(name) for name in names}
            rows = list(pool.map(lambda case: train(Path(folder), settings[case[0]], *case), cases))
        first = {row["case"]: row for row in rows}
        for name in chosen:
            again = first[f"{name}-again"]
            again["same_as_first"] = again.pop("fitness") == first[name]["fitness"]
        for row in rows:
            row.pop("fitness", None)
        return rows
    if part == "losses":
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(lambda name: alone(f"losses:{name}", sizes), names))
    if part == "pong":
        return [pong(seconds)]
    timed: Mapping[str, Iterable[str]] = {"cost": COSTS, "launches": LAUNCHED}
    return [alone(f"{part}:{name}", sizes) for name in timed[part]]


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


def train(folder: Path, settings: Sequence[str], name: str, ranks: int, suffix: str) -> Row:
    """Train a shipped configuration with `settings`, for two generations of about a thousand steps."""
    label = f"{name}{suffix}"
    command = [sys.executable, "-m", "evorl", "train", name, f"run.directory={folder}", f"run.name={label}", *settings]
    command += ["--processes", str(ranks)] if ranks > 1 else []
    began = time.perf_counter()
    code, output = run(command, 150)
    row: Row = {"case": label, "exit_code": code, "seconds": round(time.perf_counter() - began, 1)}
    path = folder / label / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    row["generations"] = len(lines)
    generations = [json.loads(line) for line in lines]
    found = [
        value
        for generation in generations
        for name, values in generation["metrics"].items()
        if "loss" in name or "gradient_norm" in name
        for value in values
        if value is not None
    ]
    row["finite"] = all(map(math.isfinite, found)) and bool(found)
    row["fitness"] = [generation["fitness"] for generation in generations]
    if code:
        row["output"] = output.strip().splitlines()[-12:]
    return row


def alone(one: str, sizes: Sequence[int]) -> Row:
    """Run one case of a part in a separate process, and return its row."""
    command = [sys.executable, __file__, "--one", one, "--sizes", *map(str, sizes)]
    code, output = run(command, 120)
    lines = output.strip().splitlines()
    if code or not lines or not lines[-1].startswith("{"):
        return {"case": one.partition(":")[2], "exit_code": code, "output": lines[-12:]}
    row: Row = json.loads(lines[-1])
    return row


def recorded(name: str, settings: Sequence[str], count: int) -> tuple[Trainer, list[Batch]]:
    """Train until `count` batches have been drawn, and return the trainer and copies of the batches."""
    trainer = Trainer(load_config([*settings, "tracking.backends=[]"], CONFIGS / f"{name}.yaml"))
    batches: list[Batch] = []
    update = trainer.learner.update

    def remember(batch: Batch) -> Any:
        batches.append(batch.mapped(torch.clone))
        return update(batch)

    trainer.learner.update = remember  # type: ignore[method-assign]
    trainer.begin()
    while len(batches) < count:
        trainer.step()
    return trainer, batches[:count]


def learner_of(agents: Sequence[Agent], algorithm: Algorithm, device: str) -> Learner:
    generator = torch_generator(1, generation=1, rank=0, purpose="acting", device=torch.device(device))
    return Learner(Policy(agents, algorithm, generator))


def losses(name: str) -> Row:
    """Compare the reported losses of the same updates on the CPU and on the training device."""
    config = load_config([], CONFIGS / f"{name}.yaml")
    if config.actors is not None:
        return {"case": name, "skipped": "its batches come from actors"}
    settings = ["population.size=2", "evolution.selection.size=1", *(SMALL_REPLAY if config.algorithm.replayed else [])]
    trainer, batches = recorded(name, settings, UPDATES)
    algorithm, seen, parameters = trainer.policy.algorithm, {}, []
    for device in ("cpu", trainer.ranks.device.type):
        agents = initial_population(trainer.config, algorithm)
        learner = learner_of(agents, algorithm, device)
        before = learner.policy.generator.get_state().clone()
        for batch in batches:
            learner.update(batch.mapped(lambda value, device=device: value.to(device)))  # type: ignore[misc]
        metrics, draws = learner.metrics(), not torch.equal(before, learner.policy.generator.get_state())
        parameters.append(learner.policy.flat.cpu())
        seen[device] = {key: metrics.sums[key] / metrics.counts[key] for key in metrics.sums}
    cpu, gpu = seen["cpu"], seen[trainer.ranks.device.type]
    differences = {
        key: float((abs(gpu[key] - cpu[key]) / (abs(cpu[key]) + 1e-3)).max()) for key in cpu if "loss" in key
    }
    worst = max(differences, key=lambda key: differences[key])
    apart = float((parameters[0] - parameters[1]).abs().max())
    return {
        "case": name,
        "draws": draws,
        "metric": worst,
        "largest_difference": differences[worst],
        "largest_difference_of_parameters": apart,
    }


def tiled(batch: Batch, agents: int) -> Batch:
    """Repeat the first agent's batch for `agents` agents."""
    return batch.mapped(lambda value: value[:1].expand(agents, *value.shape[1:]).contiguous())


def waited(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def milliseconds(step: Callable[[], object], device: torch.device, budget: float = 1.5) -> float:
    """Return the median time of a call in ms, over blocks of 5 calls after a warm-up."""
    for _ in range(3):
        step()
    times: list[float] = []
    began = waited(device)
    while (now := waited(device)) - began < budget and len(times) < 50:
        for _ in range(5):
            step()
        times.append((waited(device) - now) / 5)
    return 1e3 * statistics.median(times)


def cost(case: str, sizes: Sequence[int]) -> Row:
    """Time updates and acting for several population sizes, with the same batch for every agent."""
    name, settings = COSTS[case]
    trainer, (batch, *_) = recorded(name, [*settings, "population.size=1", "evolution.selection.size=1"], 1)
    device, algorithm, row = trainer.ranks.device, trainer.policy.algorithm, Row(case=case)
    for size in sizes:
        config = trainer.config
        population = config.population.model_copy(update={"size": size})
        agents = initial_population(config.model_copy(update={"population": population}), algorithm)
        learner, own = learner_of(agents, algorithm, device.type), tiled(batch, size)
        policy = learner.policy
        observation = {key: value[:, :8] for key, value in own.observation.items()}
        started = torch.zeros(size, 8, dtype=torch.bool)
        state = policy.initial_state(8)
        row[f"update_ms_{size}"] = round(milliseconds(partial(learner.update, own), device), 3)
        row[f"act_ms_{size}"] = round(milliseconds(partial(policy.act, observation, started, state), device), 3)
    return row


def launches(name: str) -> Row:
    """Count the kernels of an update of four agents, and time it launched singly and replayed as a CUDA graph."""
    if not torch.cuda.is_available():
        return {"case": name, "skipped": "no GPU"}
    config = load_config([], CONFIGS / f"{name}.yaml")
    settings = ["population.size=1", "evolution.selection.size=1", *(SMALL_REPLAY if config.algorithm.replayed else [])]
    trainer, (batch, *_) = recorded(name, settings, 1)
    population = trainer.config.population.model_copy(update={"size": 4})
    device, own, learners = trainer.ranks.device, tiled(batch, 4), []
    for kernel in ("auto", "graph"):
        run_settings = trainer.config.run.model_copy(update={"kernel": kernel})
        config = trainer.config.model_copy(update={"population": population, "run": run_settings})
        algorithm = make_algorithm(config, trainer.environments.interface)
        learners.append(learner_of(initial_population(config, algorithm), algorithm, device.type))
    single, captured = learners
    for _ in range(8 * UPDATES):
        single.update(own)
        captured.update(own)
    row: Row = {"case": name}
    row["largest_difference"] = float((single.policy.flat - captured.policy.flat).abs().max())
    row["update_ms"] = round(milliseconds(partial(single.update, own), device), 3)
    row["replayed_ms"] = round(milliseconds(partial(captured.update, own), device), 3)
    with torch.profiler.profile() as profile:
        for _ in range(UPDATES):
            single.update(own)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    row["kernels"] = round(len(kernels) / UPDATES, 1)
    row["gpu_ms"] = round(sum(kernel.time_range.elapsed_us() for kernel in kernels) / UPDATES / 1e3, 3)
    return row


def pong(seconds: float) -> Row:
    """Train PPO on Pong for `seconds`, and return its last metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "evorl", "train", "ppo_atari", f"run.directory={folder}", "run.name=pong"]
        command += ["tracking.backends=[]", "evaluation.episodes=1", "evaluation.confirmation_episodes=0"]
        command += ["evaluation.max_steps=500", "evolution.steps=16384"]
        code, output = run(command, seconds)
        path = Path(folder) / "pong" / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if not rows:
        return {"case": "pong", "exit_code": code, "output": output.strip().splitlines()[-12:]}
    keep = ("generation", "agent_steps", "env_steps_per_second", "wall_clock_seconds", "seconds", "train_return")
    returns = [max((value for value in row["train_return"] if value is not None), default=None) for row in rows]
    return {"case": "pong", "exit_code": code, **{key: rows[-1][key] for key in keep}, "best_returns": returns}


def table(part: str, rows: Sequence[Row]) -> str:
    lines = [f"## {part}"]
    for row in rows:
        shown = {key: value for key, value in row.items() if key != "output"}
        lines.append("  ".join(f"{key}={value}" for key, value in shown.items()))
        lines += [f"    | {line}" for line in row.get("output", [])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
