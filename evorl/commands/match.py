"""`evorl match`: games between the best agents of two runs, from both seats. Axes: F games."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from evorl.config.errors import on_one_line
from evorl.envs.games import Opponents, RandomPlayers, is_game
from evorl.league.matches import Arena, Fixture
from evorl.league.players import Fill, Players, Sides
from evorl.population import Policy
from evorl.report.statistics import interval
from evorl.runs.directory import is_own
from evorl.runs.launch import use_threads
from evorl.runs.loaded import LoadedAgent, load, refuse_code
from evorl.seeding import numpy_generator, torch_generator
from evorl.types import UserError

RANDOM = Path("random")
"""The opponent that draws its moves evenly from the allowed ones."""
PURPOSE = "match"


def match(parsed: argparse.Namespace) -> None:
    """`evorl match`."""
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


def match_of(run: Path, opponent: Path, games: int, seed: int, allow_code: bool = False) -> dict[str, Any]:
    """The results of so many games, for the best agent of `run`; an odd number is rounded up.

    Each seed is played from both seats, and the interval (Student's t) is over the pairs of such games. Agents act as
    in training, not greedily. Raises UserError if the runs are not of the same game.
    """
    loaded = _loaded(run, allow_code)
    settings, interface = loaded.config.environment, loaded.algorithm.interface
    sides: list[LoadedAgent | None] = [loaded, None]
    if opponent != RANDOM:
        sides[1] = other = _loaded(opponent, allow_code)
        spaces = [(each.observation_space, each.action_space) for each in (loaded, other)]
        there = other.config.environment
        if (there.id, there.kwargs) != (settings.id, settings.kwargs) or spaces[0] != spaces[1]:
            raise UserError(f"{opponent}: plays {there.id} with other settings or spaces than {settings.id} of {run}")
    use_threads(loaded.config.run.threads, interface.parts, ranks=1)

    def fill(seats: int) -> Fill:
        return Sides([_side(each, loaded, number, seats, seed) for number, each in enumerate(sides)], seats)

    rng = numpy_generator(seed, generation=0, rank=0, purpose=PURPOSE)
    pairs = -(-games // 2)
    fixtures = [
        Fixture(first, 1 - first, int(number)) for number in rng.integers(2**31, size=pairs) for first in (0, 1)
    ]
    with Arena(settings, interface, loaded.config.evaluation.max_steps) as arena:
        results = arena.play_as(fill, fixtures).reshape(pairs, 2)
    own = np.stack([results[:, 0], 1 - results[:, 1]], axis=1)
    found = interval(own.mean(1))
    return {
        "run": str(run),
        "opponent": str(opponent),
        "agents": [None if each is None else each.agent.id for each in sides],
        "games": 2 * pairs,
        "seed": seed,
        "won": int((own == 1).sum()),
        "drawn": int((own == 0.5).sum()),
        "lost": int((own == 0).sum()),
        "mean": float(own.mean()),
        "interval": [
            0.0 if found.low is None else max(found.low, 0.0),
            1.0 if found.high is None else min(found.high, 1.0),
        ],
        "first_seat": float(own[:, 0].mean()),
        "second_seat": float(own[:, 1].mean()),
    }


def _loaded(run: Path, allow_code: bool) -> LoadedAgent:
    """The best agent of a run that plays a game. Raises UserError."""
    loaded = load(run, allow_code=allow_code)
    refuse_code(loaded.config, allow_code or is_own(run, loaded.config))
    if not is_game(loaded.config.environment.id):
        raise UserError(f"{run}: {loaded.config.environment.id} is no game of two seats")
    return loaded


def _side(agent: LoadedAgent | None, loaded: LoadedAgent, number: int, seats: int, seed: int) -> Opponents:
    """The players of one side: a run's agent, or random moves without one."""
    if agent is None:
        rng = numpy_generator(seed, generation=0, rank=number, purpose=PURPOSE)
        return RandomPlayers(loaded.action_space, rng)
    generator = torch_generator(seed, generation=0, rank=number, purpose=PURPOSE)
    policy = Policy([agent.agent], agent.algorithm, generator)
    return Players(policy, agent.config.environment, agent.algorithm.interface, np.zeros(seats, dtype=np.intp))
