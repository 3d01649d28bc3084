"""Two-player games (PettingZoo, arXiv 2009.14471; OpenSpiel, arXiv 1908.09453)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gymnasium as gym

from evorl.config import Environment
from evorl.envs.games.game import Game
from evorl.envs.games.open_spiel import OPENSPIEL, make_open_spiel
from evorl.envs.games.pettingzoo import PETTINGZOO, has_agents, make_pettingzoo
from evorl.envs.tensor.sources import is_tensor
from evorl.system.plugins import import_from_here

GAMES: Mapping[str, Callable[[Environment], Game]] = {PETTINGZOO: make_pettingzoo, OPENSPIEL: make_open_spiel}
"""Factories of games by the part of the id before the colon; any other is a user's module, with PettingZoo's interface.
"""


def is_game(id: str) -> bool:
    """True for `pettingzoo:NAME`, `openspiel:NAME`, and a class of a module that follows an interface of PettingZoo."""
    module, _, name = id.rpartition(":")
    if not module or module in GAMES:
        return bool(module)
    if is_tensor(id):  # Importing gymnax starts JAX, before it is told to share the GPU.
        return False
    try:
        factory = getattr(import_from_here(module), name, None)
    except ImportError:
        return False
    return isinstance(factory, type) and not issubclass(factory, gym.Env) and has_agents(factory)


def make_game(settings: Environment) -> Game:
    """One copy of a game. Raises UserError if it cannot be made, or has other than two seats."""
    return GAMES.get(settings.id.rpartition(":")[0], make_pettingzoo)(settings)
