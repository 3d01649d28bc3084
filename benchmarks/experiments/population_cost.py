"""Cost of a population relative to one agent: time per vector step, learning included, for populations of 1 to 64.

    OMP_NUM_THREADS=1 python benchmarks/experiments/population_cost.py [--seconds 4] [--sizes 1 2 4 8 16 32 64] [--picture cost.png]
        [--cases dqn ppo wide-dqn wide-td3 wide-sac] [key=value ...]

Sizes take turns for three rounds and medians are compared, since the speed of machines varies. Every agent has its own
environments, so a population of N makes N times as many environment steps per vector step. The wide cases are those of
the paper on fast population-based training (arXiv 2206.08888): two layers of 256, batches of 256, an update-to-data
ratio of 1. The device is the training device, so the same command measures a GPU if there is one. On a CPU, times are
CPU times of this process, independent of other load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from evorl.runs.launch import load_config
from evorl.runs.program import run_program

sys.path.append(str(Path(__file__).parents[1]))
from throughput import Trainer

CONFIGS = Path(__file__).parents[2] / "configs" / "training"
WIDE = (
    "network.hidden_sizes=[256,256]", "algorithm.batch_size=256", "algorithm.learn_step=1", "environment.num_envs=1",
)  # fmt: skip
CASES = {
    "dqn": ("dqn", ("network.hidden_sizes=[32,32]", "algorithm.batch_size=128", "algorithm.learn_step=8")),
    "ppo": ("ppo", ("network.hidden_sizes=[32,32]",)),
    "wide-dqn": ("dqn", (*WIDE, "network.layer_norm=false")),
    "wide-td3": ("td3", WIDE),
    "wide-sac": ("sac", WIDE),
}
"""The configuration and overrides of each case."""
ROUNDS = 3


def seconds_per_step(trainer: Trainer, seconds: float) -> float:
    """Return the mean time in s of a vector step of all agents, learning included."""
    clock = time.process_time if trainer.ranks.device.type == "cpu" else time.perf_counter
    steps, began = 0, clock()
    block = max(4, trainer.experience.period)
    while (elapsed := clock() - began) < seconds or steps == 0:
        for _ in range(block):
            trainer.step()
        steps += block
    return elapsed / steps


def measure(case: str, sizes: Sequence[int], seconds: float, overrides: Sequence[str]) -> dict[int, float]:
    """Return the median time in s of a vector step for each population size."""
    trainers, (algorithm, own) = {}, CASES[case]
    for size in sizes:
        settings = [*own, f"population.size={size}", "evolution.selection.size=1", *overrides]
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
    """Plot the cost of N agents in multiples of the cost of one."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for case, times in costs.items():
        first, kind, line = min(times), case.removeprefix("wide-").upper(), "s--" if case.startswith("wide-") else "o-"
        label = f"{kind}, two layers of {256 if case.startswith('wide-') else 32}"
        axes.plot(list(times), [value / times[first] for value in times.values()], line, label=label)
    sizes = sorted({size for times in costs.values() for size in times})
    axes.plot(sizes, sizes, ":", color="grey", label="one agent after the other")
    axes.set(xscale="log", yscale="log", xlabel="agents", ylabel="time of a vector step, in that of one agent")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--picture", type=Path)
    parsed, overrides = parser.parse_known_args(arguments)
    costs = {name: measure(name, parsed.sizes, parsed.seconds, overrides) for name in parsed.cases}
    for name, times in costs.items():
        for size, value in times.items():
            row = {"case": name, "agents": size, "ms_per_step": round(1e3 * value, 3)}
            print(json.dumps(row | {"of_one_agent": round(value / times[min(times)], 2)}), flush=True)
    if parsed.picture is not None:
        draw(costs, parsed.picture)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
