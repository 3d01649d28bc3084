"""Throughput of AgileRL's PPO population loop, for side-by-side comparison. Prints one JSON line.

The agents collect and learn one after the other, as in `agilerl.training.train_on_policy`, with its rollout buffer.
Actor and critic have an encoder layer, which they share by default, and a head layer, of `hidden` units each, with
ReLU. `learn_step` counts the steps of all an agent's environments. Counts begin after one rollout of each agent.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 agilerl==2.58.0 peft "gymnasium[box2d]"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/agilerl_ppo.py --seconds 20
"""

import argparse
import json
import time
import warnings

warnings.filterwarnings("ignore")

import gymnasium as gym
import torch
from agilerl.algorithms import PPO
from agilerl.rollouts import collect_rollouts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--population", type=int, default=4)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rollout-steps", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    envs = gym.make_vec(args.env, num_envs=args.num_envs, vectorization_mode="sync")
    rollout = args.num_envs * args.rollout_steps
    layers = {"hidden_size": [args.hidden]}
    agents = [
        PPO(
            envs.single_observation_space,
            envs.single_action_space,
            index=index,
            net_config={"latent_dim": args.hidden, "encoder_config": layers, "head_config": layers},
            batch_size=args.batch_size,
            learn_step=rollout,
            update_epochs=args.epochs,
            num_envs=args.num_envs,
        )
        for index in range(args.population)
    ]

    def train_each() -> None:
        for agent in agents:
            collect_rollouts(agent, envs)
            agent.learn()

    train_each()
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < args.seconds:
        train_each()
        steps += rollout * len(agents)
    rate = steps / (time.perf_counter() - started)
    line = {
        "system": "agilerl",
        "population": args.population,
        "agent_env_steps_per_s": round(rate, 1),
        "agent_updates_per_s": round(rate * args.epochs / args.batch_size, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
