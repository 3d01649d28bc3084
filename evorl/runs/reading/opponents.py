"""Opponents by name, for `evorl match` and for `league.benchmark`.

A name is `random`, a function `package.module:player`, or the directory of a run, whose best agent plays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evorl.config import AnyConfig, Environment
from evorl.config.fields import BENCHMARK, RANDOM
from evorl.distributed import Ranks
from evorl.envs.games.players import FunctionPlayers, OpponentFactory, Opponents, RandomPlayers
from evorl.envs.spaces import EnvSpec
from evorl.league.players import Players, match_policy
from evorl.runs.reading.loaded import LoadedAgent, load
from evorl.runs.storage.trust import is_run
from evorl.seeding import torch_generator
from evorl.system.files import digest
from evorl.system.formats import encode_agents
from evorl.types.messages import shown
from evorl.types.outcomes import UserError

FORMS = "random, package.module:player, or the directory of a run"


class Opponent(NamedTuple):
    """An opponent: `seat(n)` makes its players for n seats; `agent` is the id of its agent, or None without one."""

    name: str
    seat: OpponentFactory
    agent: int | None = None
    digest: str = ""
    """The SHA-256 of its agent, or "" without one."""


class SeededPlayers(Players):
    """An agent that samples its moves with one generator for all copies, which each reset of the games seeds anew."""

    def begin(self, seeds: Sequence[int]) -> None:
        self.policy.generator.manual_seed(seeds[0])


def opponent_of(name: str, key: str, settings: Environment, interface: EnvSpec, allow_code: bool = False) -> Opponent:
    """Return the opponent that `key`, an argument or a setting, names. Raises UserError.

    `settings` are those of the game's environment, `interface` is that of the agent that it plays against. Code of
    somebody else's run is refused unless `allow_code`; a function `module:name` is imported, since the user named it.
    """
    if name == RANDOM:
        return Opponent(name, lambda seats: RandomPlayers(interface.action))
    if not is_run(name):
        players = FunctionPlayers(name, interface.observation, interface.action, key)
        return Opponent(name, lambda seats: players)
    if not os.path.isdir(name):  # noqa: PTH112 (`Path.is_dir` raises for a name that is too long.)
        raise UserError(f"{key}: there is no {shown(name)} to play against; name {FORMS}")
    loaded = load(name, allow_code=allow_code)
    check_same_game(loaded, settings, interface, name)
    return agent_opponent(loaded, name)


def agent_opponent(loaded: LoadedAgent, name: str, *, deterministic: bool = False) -> Opponent:
    """Return a loaded agent as an opponent, which samples as at the end of training unless it is `deterministic`."""

    def seat(seats: int) -> Opponents:
        generator = torch_generator(0, generation=0, rank=0, purpose="an opponent")
        policy = match_policy([loaded.agent], loaded.algorithm, generator)
        settings, interface = loaded.config.environment, loaded.algorithm.interface
        places = np.zeros(seats, dtype=np.intp)
        return SeededPlayers(policy, settings, interface, places, deterministic=deterministic)

    return Opponent(name, seat, loaded.agent.id, digest(encode_agents([loaded.agent])))


def check_same_game(loaded: LoadedAgent, here: Environment, interface: EnvSpec, name: str) -> None:
    """Raise UserError unless a run's agent plays the game of the settings `here`."""
    there = loaded.config.environment
    if there.id != here.id:
        raise UserError(f"{name}: plays {there.id}, but the game is {here.id}")
    spaces = loaded.observation_space, loaded.action_space
    if there.kwargs != here.kwargs or spaces != (interface.observation, interface.action):
        raise UserError(f"{name}: plays {there.id} with other environment.kwargs or spaces")


def benchmark_of(config: AnyConfig) -> str:
    return RANDOM if config.league is None else config.league.benchmark


def load_benchmark(config: AnyConfig, ranks: Ranks, interface: EnvSpec) -> Opponent:
    """Load the benchmark on all ranks (collective). Raises UserError on all of them, also if their agents differ."""
    name, what = benchmark_of(config), "the league's benchmark"
    with ranks.together(what):
        opponent = opponent_of(name, BENCHMARK, config.environment, interface)
    if ranks.differing(opponent.digest, what):
        raise UserError(
            f"{BENCHMARK}: the best agent of {name} differs between processes; wait until that run has ended",
            reported_elsewhere=not ranks.is_main,
        )
    return opponent
