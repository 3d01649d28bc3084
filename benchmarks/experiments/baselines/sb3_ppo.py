"""Throughput of one Stable-Baselines3 PPO agent, for side-by-side comparison. Prints one JSON line.

Actor and critic have two hidden layers each, with ReLU as in the other systems.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 "gymnasium[box2d]"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/sb3_ppo.py --seconds 20
"""

import argparse
import json
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rollout-steps", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        make_vec_env(args.env, n_envs=args.num_envs),
        policy_kwargs={"net_arch": {"pi": args.hidden, "vf": args.hidden}, "activation_fn": torch.nn.ReLU},
        n_steps=args.rollout_steps,
        n_epochs=args.epochs,
        batch_size=args.batch_size,
        device="cpu",
    )
    rollout = args.num_envs * args.rollout_steps
    model.learn(rollout)
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < args.seconds:
        model.learn(rollout, reset_num_timesteps=False)
        steps += rollout
    rate = steps / (time.perf_counter() - started)
    line = {
        "system": "sb3",
        "population": 1,
        "agent_env_steps_per_s": round(rate, 1),
        "agent_updates_per_s": round(rate * args.epochs / args.batch_size, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
