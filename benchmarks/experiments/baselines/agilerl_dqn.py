"""Throughput of AgileRL's DQN population loop, for side-by-side comparison.

Two paths of the same loop: `distributed` samples replay through the DataLoader-backed sampler that
AgileRL's distributed tutorial uses; `local` samples the buffer directly (AgileRL at its fastest).
Counts work only while learning is on. Prints one JSON line.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 agilerl==2.58.0 peft "gymnasium[box2d]"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/agilerl_dqn.py --path local --seconds 20
"""

import argparse
import json
import time
import warnings

warnings.filterwarnings("ignore")

import gymnasium as gym
import torch
from accelerate import Accelerator
from agilerl.algorithms import DQN
from agilerl.components.data import ReplayDataset, Transition
from agilerl.components.replay_buffer import ReplayBuffer
from agilerl.components.sampler import Sampler
from torch.utils.data import DataLoader


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", choices=("local", "distributed"), default="local")
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--population", type=int, default=4)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 32])
    parser.add_argument("--seconds", type=float, default=20.0)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)
    envs = gym.make_vec(args.env, num_envs=args.num_envs, vectorization_mode="sync")
    accelerator = Accelerator(cpu=True) if args.path == "distributed" else None
    agents = [
        DQN(
            envs.single_observation_space,
            envs.single_action_space,
            index=i,
            net_config={"encoder_config": {"hidden_size": args.hidden}},
            batch_size=args.batch_size,
            lr=1e-3,
            learn_step=1,
            double=True,
            accelerator=accelerator,
        )
        for i in range(args.population)
    ]
    memory = ReplayBuffer(max_size=10_000)
    if accelerator is None:
        sampler = Sampler(memory=memory)
    else:
        dataset = ReplayDataset(memory, args.batch_size)
        sampler = Sampler(dataset=dataset, dataloader=accelerator.prepare(DataLoader(dataset, batch_size=None)))

    env_steps = updates = 0
    started = None
    while started is None or time.perf_counter() - started < args.seconds:
        for agent in agents:
            obs, _ = envs.reset()
            for _ in range(25):
                action = agent.get_action(obs, 0.1)
                next_obs, reward, terminated, _, _ = envs.step(action)
                step = Transition(obs=obs, action=action, reward=reward, next_obs=next_obs, done=terminated)
                step = step.to_tensordict()
                step.batch_size = [args.num_envs]
                memory.add(step)
                obs = next_obs
                if len(memory) < 1000:
                    continue
                started = started or time.perf_counter()
                for _ in range(args.num_envs):
                    agent.learn(sampler.sample(args.batch_size))
                env_steps += args.num_envs
                updates += args.num_envs
    elapsed = time.perf_counter() - started
    print(
        json.dumps(
            {
                "system": f"agilerl-{args.path}",
                "population": args.population,
                "agent_env_steps_per_s": round(env_steps / elapsed, 1),
                "agent_updates_per_s": round(updates / elapsed, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
