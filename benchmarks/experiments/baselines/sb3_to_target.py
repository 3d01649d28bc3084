"""Time until one Stable-Baselines3 PPO agent lands on the moon, for side-by-side comparison. Prints one JSON line.

Settings are those of rl-baselines3-zoo for LunarLander. After each rollout the agent plays 10 episodes; where their
mean is the target it plays 20 more, and the run ends where these confirm it. The score is over 100 episodes after that.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 "gymnasium[box2d]"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/sb3_to_target.py --seed 1
"""

import time

STARTED = time.perf_counter()

import argparse
import json

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

ENVS, ROLLOUT = 16, 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--target", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=900.0, help="the longest time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        make_vec_env(args.env, n_envs=ENVS, seed=args.seed),
        n_steps=ROLLOUT,
        n_epochs=4,
        batch_size=64,
        gamma=0.999,
        gae_lambda=0.98,
        ent_coef=0.01,
        seed=args.seed,
        device="cpu",
    )
    fresh = make_vec_env(args.env, n_envs=10, seed=args.seed + 10_000)

    def mean_return(episodes: int) -> float:
        return float(evaluate_policy(model, fresh, n_eval_episodes=episodes)[0])

    reached = False
    while not reached and time.perf_counter() - STARTED < args.seconds:
        model.learn(ENVS * ROLLOUT, reset_num_timesteps=False)
        reached = mean_return(10) >= args.target and mean_return(20) >= args.target
    seconds = time.perf_counter() - STARTED
    line = {
        "system": "sb3",
        "seed": args.seed,
        "reached": reached,
        "seconds": round(seconds, 1),
        "steps": model.num_timesteps,
        "score": round(mean_return(100), 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
