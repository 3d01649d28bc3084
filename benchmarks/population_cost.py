"""What a population costs relative to one agent: time per vector step, learning included, for populations of 1 to 64.

    OMP_NUM_THREADS=1 python benchmarks/population_cost.py [--seconds 4] [--sizes 1 2 4 8 16 32 64] [--picture cost.png]
        [--algorithms dqn ppo] [key=value ...]

Sizes take turns for three rounds, and medians are compared, since machines change their speed. Every agent has its own
environments, so a population of N makes N times as many environment steps per vector step. The device is that of
training: the same command measures a GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from throughput import Trainer

from evorl.runs.launch import load_config, run_program

CONFIGS = Path(__file__).parent.parent / "configs" / "training"
SETTINGS = {
    "dqn": ("network.hidden_sizes=[32,32]", "algorithm.batch_size=128", "algorithm.learn_step=8"),
    "ppo": ("network.hidden_sizes=[32,32]",),
}
ROUNDS = 3


def seconds_per_step(trainer: Trainer, seconds: float) -> float:
    """Return the mean time of a vector step of all agents, learning included."""
    steps, began = 0, time.perf_counter()
    block = max(16, trainer.experience.period)
    while (elapsed := time.perf_counter() - began) < seconds or steps == 0:
        for _ in range(block):
            trainer.step()
        steps += block
    return elapsed / steps


def measure(algorithm: str, sizes: Sequence[int], seconds: float, overrides: Sequence[str]) -> dict[int, float]:
    """Return the median time of a vector step for each population size."""
    trainers = {}
    for size in sizes:
        settings = [*SETTINGS[algorithm], f"population.size={size}", "evolution.selection.size=1", *overrides]
        trainers[size] = Trainer(load_config(settings, CONFIGS / f"{algorithm}.yaml"))
        trainers[size].begin()
        while trainers[size].step() == 0:
            pass
    rounds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size, trainer in trainers.items():
            rounds[size].append(seconds_per_step(trainer, seconds / ROUNDS))
    return {size: statistics.median(times) for size, times in rounds.items()}


def draw(costs: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the cost of N agents in that of one."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for algorithm, times in costs.items():
        first = min(times)
        axes.plot(list(times), [value / times[first] for value in times.values()], "o-", label=algorithm.upper())
    axes.plot(list(times), list(times), ":", color="grey", label="one agent after the other")
    axes.set(xscale="log", yscale="log", xlabel="agents", ylabel="time of a vector step, in that of one agent")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--algorithms", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--picture", type=Path)
    parsed, overrides = parser.parse_known_args(arguments)
    costs = {name: measure(name, parsed.sizes, parsed.seconds, overrides) for name in parsed.algorithms}
    for name, times in costs.items():
        for size, value in times.items():
            row = {"algorithm": name, "agents": size, "ms_per_step": round(1e3 * value, 3)}
            print(json.dumps(row | {"of_one_agent": round(value / times[min(times)], 2)}), flush=True)
    if parsed.picture is not None:
        draw(costs, parsed.picture)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
