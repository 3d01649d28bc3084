"""Time until one of four AgileRL PPO agents lands on the moon, for side-by-side comparison. Prints one JSON line.

The loop is that of `agilerl.training.train_on_policy`, and settings are those of its configs/training/ppo/ppo.yaml, but
with a population of 4, as one agent does not evolve. Each evaluation is of 16 episodes; where the best agent's mean is
the target it plays 32 more, and the run ends where these confirm it. The score is over 96 episodes after that.

As shipped, runs of 2.58 raise from mutations of architectures: parameters and Adam's moments come to differ in shape
where actor and critic share an encoder. `--architecture 0` leaves these mutations out.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 agilerl==2.58.0 peft "gymnasium[box2d]"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/agilerl_to_target.py --seed 1
"""

import time

STARTED = time.perf_counter()

import argparse
import json
import warnings

warnings.filterwarnings("ignore")

import gymnasium as gym
import numpy as np
import torch
from agilerl.algorithms import PPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.rollouts import collect_rollouts

POPULATION, ENVS, EVO_STEPS = 4, 16, 10_240
LAYERS = {"hidden_size": [64], "activation": "Tanh", "min_mlp_nodes": 64, "max_mlp_nodes": 500, "layer_norm": True}
HEAD = {**LAYERS, "min_hidden_layers": 1, "max_hidden_layers": 3, "output_vanish": True}


def make_population(envs: gym.vector.VectorEnv) -> list[PPO]:
    ranges = HyperparameterConfig(
        lr=RLParameter(min=1e-4, max=1e-2),
        batch_size=RLParameter(min=8, max=1024, dtype=int),
        learn_step=RLParameter(min=256, max=8192, dtype=int, grow_factor=1.5, shrink_factor=0.75),
        ent_coef=RLParameter(min=1e-3, max=1e-1),
    )
    return PPO.population(
        size=POPULATION,
        observation_space=envs.single_observation_space,
        action_space=envs.single_action_space,
        hp_config=ranges,
        net_config={"latent_dim": 64, "encoder_config": LAYERS, "head_config": HEAD},
        batch_size=128,
        lr=3e-4,
        learn_step=2048,
        update_epochs=4,
        num_envs=ENVS,
    )


def train(agent: PPO, envs: gym.vector.VectorEnv) -> int:
    """Train for a generation. Returns the steps."""
    agent.set_training_mode(True)
    agent.init_training_step(True)
    rollout = -(agent.learn_step // -ENVS)
    scores: list[float] = []
    last: dict[str, object] = {}
    for _ in range(-(EVO_STEPS // -agent.learn_step)):
        episodes, *rest = collect_rollouts(agent, envs, n_steps=rollout, **last)
        last = dict(zip(("last_obs", "last_done", "last_scores", "last_info"), rest, strict=True))
        scores += episodes
        agent.learn()
    steps = -(EVO_STEPS // -agent.learn_step) * rollout * ENVS
    agent.add_scores(scores)
    agent.finalize_training_step(steps)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--target", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=900.0, help="the longest time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--architecture", type=float, default=0.2, help="the weight of mutations of architectures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 -- its mutations draw from the global generator
    envs = gym.make_vec(args.env, num_envs=ENVS, vectorization_mode="sync")
    envs.reset(seed=args.seed)
    agents = make_population(envs)
    tournament = TournamentSelection(2, True, POPULATION)
    mutations = Mutations(0.4, args.architecture, 0.2, 0.2, 0.2, 0.2, 0.1, rand_seed=args.seed)
    agents = mutations.mutation(agents, pre_training_mut=True)
    steps = 0
    while True:
        steps += sum(train(agent, envs) for agent in agents)
        best = max(agents, key=lambda agent: agent.test(envs, loop=1))
        reached = best.fitness[-1] >= args.target and best.test(envs, loop=2) >= args.target
        if reached or time.perf_counter() - STARTED > args.seconds:
            break
        _, agents, _ = tournament.select(agents)
        agents = mutations.mutation(agents)
    seconds = time.perf_counter() - STARTED
    line = {
        "system": "agilerl" if args.architecture else "agilerl_same_networks",
        "seed": args.seed,
        "reached": bool(reached),
        "seconds": round(seconds, 1),
        "steps": steps,
        "score": round(float(best.test(envs, loop=6)), 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
