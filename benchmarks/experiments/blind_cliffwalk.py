"""Updates that DQN needs on the blind cliffwalk with uniform and prioritised replay (arXiv 1511.05952, section 3.1).

    OMP_NUM_THREADS=1 python benchmarks/experiments/blind_cliffwalk.py [key=value ...] [--states 14] [--seeds 1 2 3]

In each state one of two actions advances and the other ends the episode; only the last step is rewarded. Agents act at
random, so about one in 2^(states + 1) transitions in the replay is rewarded; the replay is filled before learning
starts. Prints for each agent the number of updates until the mean squared error of its values over all states is below
1e-3, as in the paper, or null if it is not after `--updates`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from evorl.runs.launch import load_config
from evorl.runs.program import run_program

sys.path.append(str(Path(__file__).parents[1]))
from throughput import Trainer

CONFIG = Path(__file__).parents[2] / "configs" / "training" / "dqn.yaml"
KINDS = {"uniform": (), "prioritised": ("replay.prioritised={exponent: 0.6, importance_exponent: {start: 0.4}}",)}
CHECK_EVERY = 25
TOLERANCE = 1e-3
Info = dict[str, Any]


class BlindCliffwalk(gym.Env[np.int64, np.int64]):
    """A chain of states in which the right action alternates between 0 and 1."""

    def __init__(self, states: int) -> None:
        self.observation_space = gym.spaces.Discrete(states)
        self.action_space = gym.spaces.Discrete(2)
        self._states, self._state = states, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.int64, Info]:
        super().reset(seed=seed)
        self._state = 0
        return np.int64(self._state), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, Info]:
        if action != self._state % 2:
            return np.int64(self._state), 0.0, True, False, {}
        arrived = self._state + 1 == self._states
        self._state += not arrived
        return np.int64(self._state), float(arrived), arrived, False, {}


def updates_needed(states: int, most: int, settings: Sequence[str]) -> list[int | None]:
    """Return for each agent the number of updates until its values are first within tolerance, or None."""
    trainer = Trainer(load_config(settings, CONFIG))
    trainer.begin()
    agents, discount = len(trainer.policy.agents), trainer.config.algorithm.gamma
    every = torch.arange(states).expand(agents, states)
    right = discount ** torch.arange(states - 1, -1, -1)
    found: list[int | None] = [None] * agents
    done, checked = 0, 0
    while done < most and None in found:
        done += trainer.step()
        if done - checked < CHECK_EVERY:
            continue
        checked = done
        errors = (trainer.policy.value({"observation": every}, None) - right).square().mean(1)
        found = [
            done if first is None and error < TOLERANCE else first for first, error in zip(found, errors, strict=True)
        ]
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--states", type=int, default=14)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=40_000)
    parsed, overrides = parser.parse_known_args(arguments)
    gym.register("BlindCliffwalk-v0", lambda **options: BlindCliffwalk(parsed.states))
    common = (
        "environment={id: BlindCliffwalk-v0, num_envs: 8, vectorization: sync}", "network.hidden_sizes=[32,32]",
        "network.layer_norm=false", "algorithm.split_batches=false", "algorithm.batch_size=64",
        f"algorithm.gamma={1 - 1 / parsed.states}", "algorithm.learning_rate=1e-3", "algorithm.tau=0.05",
        "algorithm.learn_step=1", "algorithm.exploration={start: 1, end: 1}",
        "replay={capacity: 100000, learning_starts: 100000}", "training.max_steps=100000", *overrides,
    )  # fmt: skip
    for kind, own in KINDS.items():
        all_found: list[int | None] = []
        for seed in parsed.seeds:
            found = updates_needed(parsed.states, parsed.updates, [*common, *own, f"seed={seed}"])
            all_found += found
            print(json.dumps({"replay": kind, "states": parsed.states, "seed": seed, "updates": found}), flush=True)
        median = statistics.median([np.inf if each is None else each for each in all_found])
        print(json.dumps({"replay": kind, "median_updates": median}), flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
