"""Throughput of one Stable-Baselines3 DQN agent at one gradient update per environment step. Prints one JSON line.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 "gymnasium[box2d]"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/baselines/sb3_dqn.py --seconds 20
"""

import argparse
import json
import time

import torch
from stable_baselines3 import DQN


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 32])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        args.env,
        policy_kwargs={"net_arch": args.hidden},
        batch_size=args.batch_size,
        buffer_size=10_000,
        learning_starts=1000,
        train_freq=1,
        gradient_steps=1,
    )
    model.learn(1100)
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < args.seconds:
        model.learn(1000, reset_num_timesteps=False)
        steps += 1000
    rate = round(steps / (time.perf_counter() - started), 1)
    print(json.dumps({"system": "sb3", "population": 1, "agent_env_steps_per_s": rate, "agent_updates_per_s": rate}))


if __name__ == "__main__":
    main()
