"""Throughput of Stable-Baselines3 agents, SAC or TD3, that train one after the other. Prints one JSON line.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 gymnasium
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/sb3_off_policy.py --algorithm sac --seconds 20
"""

import argparse
import json
import time

import torch
from stable_baselines3 import SAC, TD3

FIRST = 300
STEPS = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=["sac", "td3"], default="sac")
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 256])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kind = {"sac": SAC, "td3": TD3}[args.algorithm]
    settings = {"batch_size": args.batch_size, "learning_starts": FIRST, "train_freq": 1, "gradient_steps": 1}
    models = [
        kind("MlpPolicy", args.env, policy_kwargs={"net_arch": args.hidden}, seed=seed, **settings)
        for seed in range(args.agents)
    ]
    for model in models:
        model.learn(FIRST + 10)
    steps, elapsed, cpu = 0, -time.perf_counter(), -time.process_time()
    for model in models:
        began = time.perf_counter()
        while time.perf_counter() - began < args.seconds / args.agents:
            model.learn(STEPS, reset_num_timesteps=False)
            steps += STEPS
    elapsed, cpu = elapsed + time.perf_counter(), cpu + time.process_time()
    rates = {"agent_env_steps_per_s": round(steps / elapsed, 1), "agent_env_steps_per_cpu_s": round(steps / cpu, 1)}
    print(json.dumps({"system": "sb3", "population": args.agents} | rates))


if __name__ == "__main__":
    main()
