"""`evorl play`: games of a person in the terminal against the best agent of a run."""

from __future__ import annotations

import argparse
import contextlib
from itertools import count
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.commands.match import load_player
from evorl.envs.faults.closing import close_in_time
from evorl.envs.games import make_game
from evorl.envs.games.game import Game, result_of
from evorl.envs.games.pettingzoo import MODES, TEXT
from evorl.envs.games.players import Opponents, game_move, is_allowed, move_request, reseed
from evorl.envs.spaces import EnvSpec
from evorl.runs.launch import use_threads
from evorl.runs.reading.opponents import agent_opponent
from evorl.seeding import derive_seed
from evorl.system.plugins import described
from evorl.types.messages import on_one_line
from evorl.types.outcomes import UserError
from evorl.types.tensors import Flags

QUIT = "q"
RESULTS = {1.0: "you have won", 0.5: "a draw", 0.0: "you have lost"}


def play(parsed: argparse.Namespace) -> None:
    loaded = load_player(parsed.run, parsed.allow_code)
    settings, interface = loaded.config.environment, loaded.algorithm.interface
    use_threads(loaded.config, interface.parts, ranks=1)
    name = f"agent {loaded.agent.id} of {on_one_line(str(parsed.run))}"
    agent, game = agent_opponent(loaded, name, deterministic=not parsed.sample).seat(1), make_game(settings)
    metadata = getattr(getattr(game, "env", None), "metadata", None)  # OpenSpiel's games have none.
    if TEXT in (metadata or {}).get(MODES, ()):
        game.close()
        game = make_game(settings.model_copy(update={"kwargs": {**settings.kwargs, "render_mode": TEXT}}))
    print(f"{settings.id} against {name}; a move is a number, and {QUIT} ends")
    try:
        for number in count() if parsed.games is None else range(parsed.games):
            person = (parsed.seat - 1) if parsed.seat else number % 2
            print(f"\ngame {number + 1}: you have seat {person + 1} of 2")
            seed = derive_seed(parsed.seed, generation=number, rank=0, purpose="play")
            print(RESULTS[play_game(game, interface, agent, person, seed)])
    except EOFError:
        print("\nbye")
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        raise UserError(f"environment.id: {settings.id} raised {described(error)}") from error
    finally:
        close_in_time(game.close, settings.id)


def play_game(game: Game, interface: EnvSpec, agent: Opponents, person: int, seed: int) -> float:
    """Play one game with the person in seat `person`, and return the person's result. Raises EOFError."""
    space, first = interface.action, np.array([True])

    def show() -> None:
        seen = game.seen[person].observation
        print(f"\n{game.text(person) or board(seen, space) or f'you see {seen}'}")

    reseed(agent, [seed])
    game.reset(seed % 2**31)
    while game.acting:
        moves: dict[int, Any] = {}
        if 1 - person in game.acting:
            spaces, turns = (interface.observation, space), [game.seen[1 - person]]
            moves[1 - person] = agent(move_request(spaces, interface.masked, turns, np.zeros(1, np.intp), first))[0]
            first = np.array([False])
        if person in game.acting:
            show()
            moves[person] = ask(space, game.seen[person].mask)
        if 1 - person in moves:  # In a simultaneous game the person must choose before seeing this.
            print("the agent plays", *(f"{number:g}" for number in np.reshape(moves[1 - person], -1)))
        game.step({seat: game_move(space, move) for seat, move in moves.items()})
    if person in game.seen:
        show()
    return result_of(game.totals[person], game.totals[1 - person])


def ask(space: gym.Space[Any], mask: Flags | None) -> NDArray[Any]:
    """Ask for the person's move until it is legal. Raises EOFError at the end of the input, or if it is `QUIT`."""
    legal, number = str(space), float if isinstance(space, gym.spaces.Box) else int
    if isinstance(space, gym.spaces.Discrete):
        choices = space.start + (np.arange(space.n) if mask is None else np.flatnonzero(mask))
        legal = ", ".join(map(str, choices)) if len(choices) < space.n else f"{choices[0]} to {choices[-1]}"
    while True:
        with contextlib.suppress(ValueError, OverflowError):
            words = input(f"your move ({legal}): ").replace(",", " ").split()
            if words == [QUIT]:
                raise EOFError
            move = np.array([number(word) for word in words], dtype=space.dtype).reshape(space.shape or ())
            if is_allowed(move, mask, space):
                return move
        print(f"that is not a legal move; {QUIT} ends")


def board(observation: Any, space: gym.Space[Any]) -> str | None:
    """Return a board drawn from planes [rows, columns, 2 or more], or None if they are none.

    The first planes are the stones of the viewer (X) and of the other player (O). Moves are columns or fields.
    """
    is_image = isinstance(observation, np.ndarray) and observation.ndim == 3 and observation.shape[2] >= 2
    if not is_image or not isinstance(space, gym.spaces.Discrete):
        return None
    mine, others = observation[..., 0], observation[..., 1]
    columns = mine.shape[1]
    if not np.isin(observation[..., :2], (0, 1)).all() or space.n not in (columns, mine.size, mine.size + 1):
        return None
    lines = [[space.start + column for column in range(columns)]] if space.n == columns else []
    lines += np.where(mine > 0, "X", np.where(others > 0, "O", ".")).tolist()
    drawn = ("".join(f" {cell:>{len(str(columns - 1))}}" for cell in line) for line in lines)
    return "\n".join([*drawn, "(X is you, O the agent)"])
