"""Matches between frozen agents, all games at once. Axes: F fixtures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.faults.closing import close_in_time
from evorl.envs.faults.raising import call_or_user_error
from evorl.envs.games import make_game
from evorl.envs.games.game import Game, result_of
from evorl.envs.games.players import game_move, move_request
from evorl.envs.spaces import EnvSpec
from evorl.league.players import SeatPlayers
from evorl.system.closing import Closeable
from evorl.system.signals import raise_if_signalled

MAX_GAMES = 128
"""Games that are played at once."""


class Fixture(NamedTuple):
    """A game of the agents `first` and `second`, by their places in a policy, in these seats."""

    first: int
    second: int
    seed: int


class Arena(Closeable):
    """Copies of a game in which fixtures are played."""

    def __init__(self, settings: Environment, interface: EnvSpec, max_steps: int | None = None) -> None:
        """Games are cut off after `max_steps` moves of both seats together; whoever has the higher return then wins."""
        self._settings, self._interface, self._max_steps = settings, interface, max_steps
        self._games: list[Game] = []
        self._steps = 0

    def close(self) -> None:
        for game in self._games:
            close_in_time(game.close, self._settings.id)

    def pop_steps(self) -> int:
        steps, self._steps = self._steps, 0
        return steps

    def play(self, fill: Callable[[int], SeatPlayers], fixtures: Sequence[Fixture]) -> NDArray[np.float64]:
        """The results [F] for the first seat, where `fill(S)` makes the players of S seats.

        Raises UserError if a game raises.
        """
        results: NDArray[np.float64] = call_or_user_error(f"a match of {self._settings.id}", self._play, fill, fixtures)
        return results

    def _play(self, fill: Callable[[int], SeatPlayers], fixtures: Sequence[Fixture]) -> NDArray[np.float64]:
        count = min(len(fixtures), MAX_GAMES)
        while len(self._games) < count:
            self._games.append(make_game(self._settings))
        # Seat s of game g is number 2 * g + s.
        players = fill(2 * count)
        results, waiting = np.zeros(len(fixtures)), list(range(len(fixtures)))[::-1]
        running: dict[int, int] = {}
        moved, moves = np.zeros(2 * count, dtype=bool), np.zeros(count, dtype=np.int64)
        while waiting or running:
            raise_if_signalled()
            for number in range(count):
                if number not in running and waiting:
                    running[number] = waiting.pop()
                    fixture = fixtures[running[number]]
                    players.places[2 * number : 2 * number + 2] = fixture.first, fixture.second
                    moved[2 * number : 2 * number + 2], moves[number] = False, 0
                    self._games[number].reset(fixture.seed)
            for number in running:
                moves[number] += len(self._games[number].acting)
            self._move(players, list(running), moved)
            for number in list(running):
                game = self._games[number]
                if not game.acting or (self._max_steps is not None and moves[number] >= self._max_steps):
                    results[running.pop(number)] = result_of(*game.totals)
        return results

    def _move(self, players: SeatPlayers, running: Sequence[int], moved: NDArray[np.bool_]) -> None:
        """Move once in each running game, with one call for all; `moved` [2 N] are seats that have moved before."""
        asking = [(number, seat) for number in running for seat in self._games[number].acting]
        turns = [self._games[number].seen[seat] for number, seat in asking]
        seats = np.array([2 * number + seat for number, seat in asking], dtype=np.intp)
        spaces = self._interface.observation, self._interface.action
        actions = players(move_request(spaces, self._interface.masked, turns, seats, ~moved[seats]))
        moved[seats] = True
        self._steps += len(seats)
        chosen: dict[int, dict[int, Any]] = {}
        for (number, seat), action in zip(asking, actions, strict=True):
            chosen.setdefault(number, {})[seat] = game_move(self._interface.action, action)
        for number, moves in chosen.items():
            self._games[number].step(moves)
