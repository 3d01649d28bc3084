"""Train on a fair coin that draws from NumPy's global generator, and count the runs that certify a mean above 0.8.

    OMP_NUM_THREADS=1 python tests/robustness/coin.py [--seeds 20]

Half of the runs have their environments in processes (`vectorization: async`), the others have actor processes as well.
Exits with 1 if a run is certified.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import evorl

MODULES = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = {
    "tracking.backends": [], "population.size": 2, "environment.vectorization": "async", "environment.num_envs": 4,
    "network.hidden_sizes": [16], "training.target_fitness": 0.8, "evaluation.episodes": 10, "evolution.steps": 128,
    "training.max_steps": 1024,
}  # fmt: skip
SYSTEMS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.rollout_steps": 32, "algorithm.batch_size": 32, "algorithm.epochs": 2},
    "impala": {"actors.count": 2},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(1, 1 + parser.parse_args().seeds)
    sys.path.append(str(MODULES))
    certified = 0
    with tempfile.TemporaryDirectory() as directory:
        for name, own in SYSTEMS.items():
            means = []
            for seed in seeds:
                place: dict[str, Any] = {"run.directory": directory, "run.name": f"{name}-{seed}"}
                summary = evorl.train(
                    f"{name}.yaml", environment="helpers.probes:Coin", seed=seed, **SETTINGS, **own, **place
                ).summary
                certified += summary["solved"]
                means.append(summary["best_fitness"])
            print(f"{name}: best agents' means {min(means):.2f} to {max(means):.2f} in {len(means)} runs")
    print(f"{certified} runs certified")
    return int(certified > 0)


if __name__ == "__main__":
    sys.exit(main())
