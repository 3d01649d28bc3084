"""`evorl match`: games of a run's best agent against an opponent, from both seats."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from evorl.envs.games import is_game
from evorl.envs.games.players import reseed
from evorl.envs.vector import for_evaluation
from evorl.league.matches import Arena, Fixture
from evorl.league.players import SeatPlayers, Sides
from evorl.report.statistics import score_of
from evorl.runs.launch import use_threads
from evorl.runs.reading.loaded import LoadedAgent, load
from evorl.runs.reading.opponents import agent_opponent, opponent_of
from evorl.runs.storage.trust import refuse_code
from evorl.seeding import derive_seed, numpy_generator
from evorl.types.messages import on_one_line
from evorl.types.outcomes import UserError

PURPOSE = "match"


def match(parsed: argparse.Namespace) -> None:
    result = match_of(parsed.run, parsed.opponent, parsed.games, parsed.seed, parsed.allow_code)
    if parsed.json:
        print(json.dumps(result))
        return
    one, other = (on_one_line(str(result[name])) for name in ("run", "opponent"))
    low, high = result["interval"]
    print(
        f"{one} against {other}: {result['won']} won, {result['drawn']} drawn, {result['lost']} lost\n"
        f"mean result {result['mean']:.3g} (95 % interval {low:.3g} to {high:.3g}); in the first seat "
        f"{result['first_seat']:.3g}, in the second {result['second_seat']:.3g}"
    )


def match_of(run: Path, opponent: str, games: int, seed: int, allow_code: bool) -> dict[str, Any]:
    """The results of this many games, for the best agent of `run`; an odd number is rounded up.

    Each seed is played from both seats, and the interval (`result_interval`) is over these pairs of games. Agents of
    runs act as at the end of training, not greedily. Raises UserError if the opponent does not play the same game.
    """
    loaded = load_player(run, allow_code)
    settings, interface = loaded.config.environment, loaded.algorithm.interface
    sides = [
        agent_opponent(loaded, str(run)),
        opponent_of(opponent, "opponent", settings, interface, allow_code),
    ]
    use_threads(loaded.config, interface.parts, ranks=1)

    def fill(seats: int) -> SeatPlayers:
        players = [side.seat(seats) for side in sides]
        for number, each in enumerate(players):
            reseed(each, [derive_seed(seed, generation=0, rank=number, purpose=PURPOSE)])
        return Sides(players, seats)

    rng = numpy_generator(seed, generation=0, rank=0, purpose=PURPOSE)
    pairs = -(-games // 2)
    fixtures = [
        Fixture(first, 1 - first, int(number)) for number in rng.integers(2**31, size=pairs) for first in (0, 1)
    ]
    with Arena(settings, interface, loaded.config.evaluation.max_steps) as arena:
        results = arena.play(fill, fixtures).reshape(pairs, 2)
    of_opponent = np.stack([results[:, 0], 1 - results[:, 1]], axis=1)
    return {
        "run": str(run),
        "opponent": str(opponent),
        "agents": [side.agent for side in sides],
        "games": 2 * pairs,
        "seed": seed,
        **score_of(of_opponent),
    }


def load_player(run: Path, allow_code: bool) -> LoadedAgent:
    """The best agent of a run whose environment is a game. Raises UserError."""
    loaded = load(run, allow_code=allow_code)
    refuse_code(loaded.config, allow_code)
    if not is_game(loaded.config.environment.id):
        for_evaluation(loaded.config.environment)  # An id that cannot be imported gets its own error.
        raise UserError(f"{run}: {loaded.config.environment.id} is not a two-player game")
    return loaded
