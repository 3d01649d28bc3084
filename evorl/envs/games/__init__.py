"""Two-player games (PettingZoo, arXiv 2009.14471; OpenSpiel, arXiv 1908.09453)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from evorl.config import Environment
from evorl.envs.faults.closing import close_in_time
from evorl.envs.faults.restarting import PASSED_ON, restart
from evorl.envs.games.game import Game
from evorl.envs.games.open_spiel import OPENSPIEL, make_open_spiel
from evorl.envs.games.pettingzoo import PETTINGZOO, has_agents, make_pettingzoo
from evorl.system.plugins import described, import_from_here
from evorl.types.outcomes import UserError

GAMES: Mapping[str, Callable[[Environment], Game]] = {PETTINGZOO: make_pettingzoo, OPENSPIEL: make_open_spiel}
"""Factories of games by the part of the id before the colon; any other is a user's module, with PettingZoo's interface.
"""


def is_game(id: str) -> bool:
    """True for `pettingzoo:NAME`, `openspiel:NAME`, and a class of a module that follows an interface of PettingZoo."""
    module, _, name = id.rpartition(":")
    if not module or module in GAMES:
        return bool(module)
    try:
        factory = getattr(import_from_here(module), name, None)
    except ImportError:
        return False
    return isinstance(factory, type) and not issubclass(factory, gym.Env) and has_agents(factory)


def make_game(settings: Environment) -> Game:
    """One copy of a game. Raises UserError if it cannot be made, or has other than two seats."""
    return GAMES.get(settings.id.rpartition(":")[0], make_pettingzoo)(settings)


class RestartingGame:
    """A copy of a game that is made anew if it raises, and then begins an episode with another seed.

    Both methods raise UserError after more than `environment.max_restarts` errors.
    """

    def __init__(self, settings: Environment) -> None:
        self._settings, self._seed = settings, 0
        self.game = make_game(settings)
        self.failures = 0
        """The number of errors; a caller that counts them itself sets it back to 0."""
        self.error: BaseException
        """The last error, if there was one."""

    def reset(self, seed: int) -> bool:
        """Begin an episode; False if that raised, so that its seed is another one."""
        self._seed = seed
        return self._called(lambda: self.game.reset(seed))

    def step(self, moves: Mapping[int, Any]) -> bool:
        """Move with the acting seats; False if that raised, so that another episode has begun."""
        return self._called(lambda: self.game.step(moves))

    def _called(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except PASSED_ON:
            raise
        except BaseException as error:
            most = self._settings.max_restarts
            self.error, failures, _ = restart(error, most - self.failures, self._seed, self._begin_anew)
            self.failures += failures
            if self.failures > most:
                raise UserError(
                    f"environment.max_restarts: {self._settings.id} raised {described(self.error)}; after {most} "
                    "restarts, the maximum for each copy"
                ) from error
            return False
        return True

    def _begin_anew(self, seed: int) -> None:
        close_in_time(self.game.close, self._settings.id)
        self.game, self._seed = make_game(self._settings), seed
        self.game.reset(seed)
