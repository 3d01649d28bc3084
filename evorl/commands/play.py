"""`evorl play`: games of a person in the terminal against the best agent of a run. Axes: A actions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from itertools import count, groupby
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.commands.match import load_player
from evorl.config import Environment
from evorl.config.errors import on_one_line, shown
from evorl.envs.closing import close_in_time
from evorl.envs.games import MODES, TEXT, Asked, Opponents, batched, is_allowed, make_game, reseed, result_of
from evorl.envs.spaces import EnvSpec, choices
from evorl.envs.turns import Game, Turn
from evorl.runs.launch import use_threads
from evorl.runs.opponents import agent_opponent
from evorl.seeding import derive_seed
from evorl.system.console import has_display
from evorl.system.plugins import described
from evorl.types import Flags, UserError

PURPOSE = "play"
QUIT = "q"
RESULTS: Mapping[float, str] = {1.0: "you have won", 0.5: "a draw", 0.0: "you have lost"}
MARKS = "XO."
"""Marks for the viewer's stones, the opponent's stones, and an empty field."""


class Left(Exception):
    """The person ends the session."""


def play(parsed: argparse.Namespace) -> None:
    """`evorl play`."""
    loaded = load_player(parsed.run, parsed.allow_code)
    settings, interface = loaded.config.environment, loaded.algorithm.interface
    use_threads(loaded.config.run.threads, interface.parts, ranks=1)
    name = f"agent {loaded.agent.id} of {on_one_line(str(parsed.run))}"
    agent = agent_opponent(loaded, name, deterministic=not parsed.sample).seat(1)
    game, show = _shown(settings, interface, parsed.window)
    results: list[float] = []
    print(f"{settings.id} against {name}; a move is a number, and {QUIT} ends")
    try:
        for number in count() if parsed.games is None else range(parsed.games):
            table = Table(game, interface, agent, show, (parsed.seat - 1) if parsed.seat else number % 2)
            print(f"\ngame {number + 1}: you have seat {table.person + 1} of 2")
            results.append(table.play(derive_seed(parsed.seed, generation=number, rank=0, purpose=PURPOSE)))
            print(RESULTS[results[-1]])
    except (Left, EOFError):
        print("\nbye")
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        raise UserError(f"environment.id: {settings.id} raised: {described(error)}") from error
    finally:
        close_in_time(game.close, settings.id)
    if results:
        won, drawn, lost = (results.count(each) for each in RESULTS)
        print(f"you have won {won}, drawn {drawn} and lost {lost} of {len(results)}")


class Table:
    """One game between a person in seat `person` and an agent."""

    def __init__(
        self, game: Game, interface: EnvSpec, agent: Opponents, show: Callable[[Turn, int], str], person: int
    ) -> None:
        self.person = person
        self._game, self._interface, self._agent, self._show = game, interface, agent, show
        self._has_moved = False

    def play(self, seed: int) -> float:
        """Play a game; return the person's result. Raises Left."""
        reseed(self._agent, seed)
        self._game.reset(seed % 2**31)
        while self._game.acting:
            # In a simultaneous game the agent's move is printed only after the person's.
            moves = {seat: self._agents_move(seat) for seat in self._game.acting if seat != self.person}
            told = "".join(f"the agent plays {_written(move)}\n" for move in moves.values())
            if self.person in self._game.acting:
                turn = self._game.seen[self.person]
                print(self._show(turn, self.person))
                moves[self.person] = ask(self._interface.action, turn.mask)
            print(told, end="", flush=True)
            self._game.step({seat: _plain(move, self._interface.action) for seat, move in moves.items()})
        if self.person in self._game.seen:
            print(self._show(self._game.seen[self.person], self.person))
        own, others = self._game.totals[self.person], self._game.totals[1 - self.person]
        return result_of(own, others)

    def _agents_move(self, seat: int) -> Any:
        turn = self._game.seen[seat]
        mask = turn.mask
        if mask is None and (size := self._interface.mask_size):
            mask = np.ones(size, dtype=bool)
        first, self._has_moved = not self._has_moved, True
        observation = batched(self._interface.observation, [turn.observation])
        asked = Asked(observation, None if mask is None else mask[None], np.zeros(1, np.intp), np.array([first]))
        return self._agent(asked)[0]


def ask(space: gym.Space[Any], mask: Flags | None) -> NDArray[Any]:
    """Ask for the person's move until it is legal. Raises Left, and EOFError at the end of the input."""
    told = moves_of(space, mask)
    while True:
        try:
            given = input(f"your move ({told}): ").strip()
        except UnicodeDecodeError:
            print("the input is not valid in the terminal's encoding")
            continue
        if given.lower() == QUIT:
            raise Left
        move = _read(given, space)
        if isinstance(move, str):
            print(move)
        elif is_allowed(move, mask, space):
            return move
        else:
            print(f"{shown(given)} is not allowed; the moves are {told}")


def _read(given: str, space: gym.Space[Any]) -> NDArray[Any] | str:
    """The parsed move, which may still be illegal, or a message about what is wrong with it."""
    words, size = given.replace(",", " ").split(), int(np.prod(space.shape or ()))
    if len(words) != size:
        return f"a move is {'one number' if size == 1 else f'{size} numbers'}; {QUIT} ends"
    is_whole = not isinstance(space, gym.spaces.Box)
    try:
        numbers = [int(word) if is_whole else float(word) for word in words]
        return np.array(numbers, dtype=space.dtype).reshape(space.shape or ())
    except (ValueError, OverflowError):
        return f"{shown(given)} is not a {'whole ' if is_whole else ''}number; {QUIT} ends"


def moves_of(space: gym.Space[Any], mask: Flags | None) -> str:
    """The allowed moves in words, those of several choices one after the other."""
    if isinstance(space, gym.spaces.Box):
        ends = np.unique(np.stack([space.low.reshape(-1), space.high.reshape(-1)]), axis=1)
        between = f"from {ends[0, 0]:g} to {ends[1, 0]:g}" if ends.shape[1] == 1 else "within the bounds of its space"
        return f"{int(np.prod(space.shape))} numbers {between}"
    sizes = choices(space)
    flags = np.ones(sum(sizes), dtype=bool) if mask is None else mask
    starts = np.broadcast_to(space.start, space.shape or ()).reshape(-1)  # type: ignore[attr-defined]
    parts = np.split(flags, np.cumsum(sizes)[:-1])
    return "; ".join(_ranges(np.flatnonzero(part) + start) for part, start in zip(parts, starts, strict=True))


def _ranges(numbers: NDArray[Any]) -> str:
    """Ascending numbers in words: `0 to 4, 6`."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(numbers.tolist()), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _written(move: Any) -> str:
    return " ".join(f"{number:g}" for number in np.reshape(move, -1))


def _plain(move: Any, space: gym.Space[Any]) -> Any:
    return int(move) if isinstance(space, gym.spaces.Discrete) else move


def _shown(settings: Environment, interface: EnvSpec, window: bool) -> tuple[Game, Callable[[Turn, int], str]]:
    """The game, and a function that shows a turn in a window or as text. Raises UserError if `window` is impossible."""
    game = make_game(settings)
    # OpenSpiel's games have no window.
    env = getattr(game, "env", None)
    modes = (getattr(env, "metadata", None) or {}).get(MODES, ())
    mode = "human" if window else TEXT
    if window and mode not in modes:
        game.close()
        raise UserError(f"--window: {settings.id} has no window of its own; without it the game is shown as text")
    if window and not has_display("SDL_VIDEODRIVER"):
        game.close()
        raise UserError("--window: there is no display; without it the game is shown as text")
    if mode in modes:
        game.close()
        game = make_game(settings.model_copy(update={"kwargs": {**settings.kwargs, "render_mode": mode}}))
        env = game.env  # type: ignore[attr-defined]

    def show(turn: Turn, seat: int) -> str:
        if window and env is not None:
            env.render()
            return ""
        if (drawn := board(turn.observation, turn.mask, interface.action)) is not None:
            return drawn
        return f"\n{game.text(seat) or _numbers(turn.observation)}"

    return game, show


def board(observation: Any, mask: Flags | None, space: gym.Space[Any]) -> str | None:
    """A board drawn from an observation of planes, or None if it is not a board.

    Planes [rows, columns, 2 or more], or [2, rows, columns], begin with the stones of the viewer (X) and of the other
    player (O). Columns or empty fields are numbered, whichever are the moves.
    """
    planes: NDArray[Any] = np.asarray(observation) if not isinstance(observation, Mapping | tuple) else np.zeros(0)
    if planes.ndim == 3 and planes.shape[0] == 2 < planes.shape[2]:
        planes = np.moveaxis(planes, 0, 2)
    if planes.ndim != 3 or min(planes.shape) < 2 or not isinstance(space, gym.spaces.Discrete):
        return None
    own, others = planes[..., 0], planes[..., 1]
    if not np.isin(planes[..., :2], (0, 1)).all() or (own * others).any():
        return None
    rows, columns = own.shape
    actions, start = int(space.n), int(space.start)
    if actions not in (columns, rows * columns, rows * columns + 1):
        return None
    cells = np.where(own > 0, MARKS[0], np.where(others > 0, MARKS[1], MARKS[2])).astype(object)
    empty = (own + others == 0).reshape(-1)
    lines = [list(row) for row in cells]
    if actions == columns:
        lines.insert(0, [str(start + column) for column in range(columns)])
    elif mask is not None and (mask[: rows * columns] <= empty).all():
        named = np.array([str(start + field) for field in range(rows * columns)], dtype=object)
        cells.reshape(-1)[mask[: rows * columns]] = named[mask[: rows * columns]]
        lines = [list(row) for row in cells]
    width = max(len(cell) for line in lines for cell in line)
    drawn = ["".join(f" {cell:>{width}}" for cell in line) for line in lines]
    return "\n" + "\n".join([*drawn, f"({MARKS[0]} is you, {MARKS[1]} the agent)"])


def _numbers(observation: Any) -> str:
    """An observation as numbers, by the names of its parts."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_numbers(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        return "\n".join(map(_numbers, observation))
    return f"you see {np.array2string(np.asarray(observation), threshold=200, precision=3, suppress_small=True)}"
