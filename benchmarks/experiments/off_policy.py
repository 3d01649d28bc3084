"""Throughput of SAC and TD3 populations compared with Stable-Baselines3 agents trained one after another.

    OMP_NUM_THREADS=1 python benchmarks/experiments/off_policy.py --peer V/bin/python [--rounds 3] [--seconds 16] [key=value ...]

Every agent has two hidden layers of 256, batches of 256 and an update-to-data ratio of 1 on Pendulum. Systems take
turns. For each system and round, prints the agents' environment steps per second, which equal updates per second. The
share is relative to the arithmetic rate that batched products of [agents, 256, 256] alone reach in the same minute. V
is the virtual environment of `benchmarks/experiments/baselines/sb3_off_policy.py`. Times are CPU seconds of each single-threaded
process, independent of other load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent
AGENTS, UNITS, BATCH = 8, 256, 256
OBSERVATION, ACTION = 3, 1
ACTOR = OBSERVATION * UNITS + UNITS * UNITS
CRITICS = 2 * ((OBSERVATION + ACTION) * UNITS + UNITS * UNITS)
PASSES = {
    # Actor: forward for the target and the actor loss, and backward. Critics: forward for target and loss and backward,
    # and forward and backward to the action.
    "sac": 4 * ACTOR + 6 * CRITICS,
    # The actor is updated in every second update, through one of the critics.
    "td3": (1 + 3 / 2) * ACTOR + (4 + 1 / 2) * CRITICS,
}
"""Multiplications of one update of an agent per transition of its batch, without heads."""
SETTINGS = (
    "environment={id: Pendulum-v1, num_envs: 1}", f"network.hidden_sizes=[{UNITS},{UNITS}]",
    f"algorithm.batch_size={BATCH}", "algorithm.learn_step=1", "algorithm.split_batches=false",
    f"population.size={AGENTS}", "replay.learning_starts=2400",
)  # fmt: skip


def peak(dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of batched products alone, in the fastest of 5 rounds."""
    x, y = (torch.randn(AGENTS, UNITS, UNITS).to(dtype) for _ in range(2))
    fastest, count = float("inf"), 50
    for _ in range(5):
        began = time.process_time()
        for _ in range(count):
            torch.bmm(x, y)
        fastest = min(fastest, time.process_time() - began)
    return 2 * count * AGENTS * UNITS**3 / fastest


def rate(command: list[str]) -> float:
    """Run a benchmark and return the agent steps per CPU second that it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["agent_env_steps_per_cpu_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="the Python of an environment with Stable-Baselines3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--algorithms", nargs="+", choices=list(PASSES), default=list(PASSES))
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parsed = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    seconds = ["--seconds", str(parsed.seconds)]
    for algorithm in parsed.algorithms:
        config = BENCHMARKS.parent / "configs" / "training" / f"{algorithm}.yaml"
        own = [sys.executable, str(BENCHMARKS / "throughput.py"), "--config", str(config), *seconds, *SETTINGS]
        peer = [parsed.peer, str(HERE / "baselines" / "sb3_off_policy.py"), "--algorithm", algorithm, *seconds]
        systems = {
            "sb3": (peer, None),
            "evorl": ([*own, *parsed.overrides], torch.float32),
            "evorl, bf16": ([*own, *parsed.overrides, "network.bf16=true"], torch.bfloat16),
        }
        rates: dict[str, list[float]] = {name: [] for name in systems}
        shares: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(parsed.rounds):
            for name, (command, dtype) in systems.items():
                rates[name].append(rate(command))
                if dtype is not None:
                    shares[name].append(2 * BATCH * PASSES[algorithm] * rates[name][-1] / peak(dtype))
        for name, values in rates.items():
            row = {"algorithm": algorithm, "system": name, "agents": AGENTS, "steps_per_s": values}
            row["against_sb3"] = round(statistics.median(values) / statistics.median(rates["sb3"]), 2)
            if shares[name]:
                row["share_of_arithmetic"] = round(statistics.median(shares[name]), 3)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
