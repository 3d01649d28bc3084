"""Moves of Connect Four per second of CPU time: of the game alone, and with opponents, without and with learning.

    OMP_NUM_THREADS=1 python benchmarks/experiments/league_cost.py [--seconds 4] [--rounds 5] [--profile CASE] [key=value ...]

The cases take turns for some rounds, in each for so many seconds, and medians are compared: of the rates, and of the
ratios within a round. A move is one seat's, the learner's or the opponent's. `game` steps the game itself with random
legal moves, and `vector` the learner's environments, with opponents and a learner that move at random. `random`, `one`
and `sixteen` train the population of the configuration against random moves, against one frozen agent, and against
sixteen, which are drawn evenly for the environments, as from an archive of that size.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.config import AnyConfig, Environment
from evorl.envs import Environments
from evorl.envs.games import make_game
from evorl.envs.games.players import MoveRequest, Opponents, RandomPlayers
from evorl.envs.games.vector import GameVector
from evorl.envs.spaces import MASK
from evorl.league.players import Players
from evorl.population import Policy, initial_population
from evorl.runs.launch import load_config
from evorl.runs.program import run_program
from evorl.seeding import torch_generator

sys.path.append(str(Path(__file__).parents[1]))
from throughput import Trainer

CONFIG = Path(__file__).parents[2] / "configs" / "training" / "ppo_connect_four.yaml"
OPPONENTS: Mapping[str, int] = {"random": 0, "one": 1, "sixteen": 16}
"""The frozen agents in the other seats of each case that trains; without any, moves are random."""
Step = Callable[[], int]
"""Plays some moves and returns their number."""


class Counted:
    """Opponents whose moves are counted."""

    def __init__(self, opponents: Opponents) -> None:
        self.moves, self._opponents = 0, opponents

    def __call__(self, asked: MoveRequest) -> NDArray[Any]:
        self.moves += len(asked.copies)
        moves: NDArray[Any] = self._opponents(asked)
        return moves

    def pop(self) -> int:
        """The moves since the last call."""
        moves, self.moves = self.moves, 0
        return moves


def of_game(settings: Environment) -> Step:
    """Single moves of one game, without evorl around it."""
    game = make_game(settings).env  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    game.reset(seed=0)

    def step() -> int:
        shares = rng.random(64)
        for share in shares:
            observation, _, terminated, truncated, _ = game.last()
            if terminated or truncated:
                game.reset(seed=0)
                observation, *_ = game.last()
            legal = np.flatnonzero(observation[MASK])
            game.step(int(legal[int(share * len(legal))]))
        return len(shares)

    return step


def of_vector(settings: Environment, copies: int) -> Step:
    """Steps of all copies, with random moves in either seat."""
    vector = GameVector(settings, copies)
    counted = Counted(RandomPlayers(vector.single_action_space))
    learner = RandomPlayers(vector.single_action_space)
    learner.begin([1])
    _, info = vector.reset(seed=0)
    vector.opponents = counted
    masks, everyone = info[MASK], np.arange(copies)

    def step() -> int:
        nonlocal masks
        *_, info = vector.step(learner(MoveRequest(None, masks, everyone, np.zeros(copies, dtype=bool))))
        masks = info[MASK]
        return copies + counted.pop()

    return step


def of_training(config: AnyConfig, opponents: int) -> Step:
    """Rollouts of the population with the updates that they are for."""
    trainer = Trainer(config)
    environments: Environments = trainer.environments
    copies = environments.agents * environments.num_envs
    algorithm = trainer.policy.algorithm
    others: Opponents = RandomPlayers(environments.interface.action)
    if opponents:
        agents = [initial_population(config, algorithm)[0] for _ in range(opponents)]
        generator = torch_generator(0, generation=1, rank=0, purpose="opponents", device=trainer.ranks.device)
        places = np.random.default_rng(0).integers(opponents, size=copies)
        others = Players(Policy(agents, algorithm, generator), config.environment, environments.interface, places)
    counted = Counted(others)
    environments.set_opponents(counted)
    trainer.begin()
    period = trainer.experience.period

    def step() -> int:
        for _ in range(period):
            trainer.step()
        return period * copies + counted.pop()

    return step


def cases(config: AnyConfig) -> dict[str, Step]:
    """All cases by name."""
    copies = config.population.size * config.environment.num_envs
    made = {"game": of_game(config.environment), "vector": of_vector(config.environment, copies)}
    return made | {name: of_training(config, opponents) for name, opponents in OPPONENTS.items()}


def rate(step: Step, seconds: float) -> float:
    """Moves per second of CPU time."""
    moves, began = 0, time.process_time()
    while (elapsed := time.process_time() - began) < seconds:
        moves += step()
    return moves / elapsed


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", choices=["game", "vector", *OPPONENTS])
    parsed, overrides = parser.parse_known_args(arguments)
    steps = cases(load_config(["tracking.backends=[]", *overrides], CONFIG))
    for step in steps.values():
        step()
    if parsed.profile:
        profile = cProfile.Profile()
        profile.runcall(rate, steps[parsed.profile], parsed.seconds)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    rounds = [{name: rate(step, parsed.seconds) for name, step in steps.items()} for _ in range(parsed.rounds)]
    for name in steps:
        row = {"case": name, "moves_per_cpu_s": round(statistics.median(each[name] for each in rounds))}
        row |= {f"of_{other}": round(statistics.median(each[name] / each[other] for each in rounds), 3)
                for other in ("game", "one")}  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
