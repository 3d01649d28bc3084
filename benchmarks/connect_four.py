"""Play a run's best agent in Connect Four against random moves, a minimax of four plies and MCTS; append JSON lines.

    python benchmarks/connect_four.py RUN ... [--generation N] [--games 100] [--against minimax ...] [--sample]
    python benchmarks/connect_four.py --validate [--games 100]
    evorl match RUN benchmarks.connect_four:minimax

Every game begins with two random plies, one of each player, since deterministic players would repeat one game; each
such opening is played from both seats. Then the agent moves greedily, or samples with `--sample`. The 95 % interval is
over the pairs of games of an opening. MCTS is OpenSpiel's (UCT with c = 2, one random rollout at each leaf, proven wins
backed up); it needs `pip install open_spiel`. `--validate` plays the opponents against each other.

As `module:player` each opponent is a function of the position alone: it breaks ties and rolls out with a generator that
the position seeds. Axes: 6 rows, the top one first, and 7 columns; boards are integers of 7 bits for each column, the
lowest field first, whose highest bit stays empty, as in John Tromp's Fhourstones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.games.open_spiel import make_open_spiel
from evorl.report.statistics import score_of
from evorl.runs.reading.loaded import LoadedAgent, load
from evorl.runs.reading.read import read_run

DATA = Path(__file__).parent / "data" / "connect_four.jsonl"
PETTINGZOO, OPENSPIEL, OWN = (
    "pettingzoo:connect_four_v3",
    "openspiel:connect_four",
    "benchmarks.connect_four:ConnectFour",
)
ROWS, COLUMNS = 6, 7
SHIFTS = (1, ROWS, ROWS + 1, ROWS + 2)
"""Bits between neighbouring fields of a vertical, a falling, a horizontal and a rising line."""
FULL = sum(((1 << ROWS) - 1) << (ROWS + 1) * column for column in range(COLUMNS))
DEPTH = 4
WORTH = (0, 1, 5, 25)
"""The value of an open line, in which only one player has stones, by their number."""
WON = 10_000
UCT_C = 2.0
MEGABYTES = 64
OPENING = 2
"""Random plies at the beginning of a game."""
Player = Callable[[NDArray[Any], NDArray[Any]], int]
"""A move from an observation [rows, columns, 2], of which the first plane has the mover's stones, and a mask [7]."""


class Position(NamedTuple):
    """The stones of the player to move, and those of the other one."""

    own: int
    others: int

    @classmethod
    def of(cls, observation: NDArray[Any]) -> Position:
        """The position in an observation."""
        boards = []
        for plane in np.moveaxis(np.asarray(observation), 2, 0):
            places = np.argwhere(plane)
            boards.append(sum(1 << int((ROWS + 1) * column + ROWS - 1 - row) for row, column in places))
        return cls(*boards)

    @property
    def observation(self) -> NDArray[np.int8]:
        """The position as PettingZoo's game shows it to the player to move."""
        planes = np.zeros((ROWS, COLUMNS, 2), dtype=np.int8)
        for number, board in enumerate(self):
            for column in range(COLUMNS):
                for height in range(ROWS):
                    planes[ROWS - 1 - height, column, number] = board >> (ROWS + 1) * column + height & 1
        return planes

    @property
    def moves(self) -> list[int]:
        """The columns that are not full, those in the middle first."""
        taken = self.own | self.others
        return [column for column in (3, 2, 4, 1, 5, 0, 6) if not taken >> ((ROWS + 1) * column + ROWS - 1) & 1]

    @property
    def is_full(self) -> bool:
        return self.own | self.others == FULL

    def after(self, column: int) -> Position:
        """The position after a move, as the other player sees it."""
        taken = self.own | self.others
        # Adding to the lowest bit of a column carries to its first empty field.
        placed = (taken + (1 << (ROWS + 1) * column)) & ~taken & ((1 << ROWS) - 1) << (ROWS + 1) * column
        return Position(self.others, self.own | placed)


class ConnectFour:
    """PettingZoo's game, with its interface (AEC), observations and rewards, at 3.3 times its moves per second.

    It is for training: `environment=benchmarks.connect_four:ConnectFour`, in the clone's folder. A game begins with up
    to `opening` random plies, 6 at most, so that agents learn positions to which their own moves do not lead.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    possible_agents: ClassVar[list[str]] = ["player_0", "player_1"]

    def __init__(self, opening: int = 0) -> None:
        self._opening, self._rng = opening, np.random.default_rng()
        self.agents: list[str] = []
        self.agent_selection = ""
        self._space = gym.spaces.Dict(
            {
                "observation": gym.spaces.Box(0, 1, (ROWS, COLUMNS, 2), np.int8),
                "action_mask": gym.spaces.Box(0, 1, (COLUMNS,), np.int8),
            }
        )
        self._actions = gym.spaces.Discrete(COLUMNS)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return self._space

    def action_space(self, agent: str) -> gym.Space[Any]:
        return self._actions

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin a game, and a new sequence of openings if there is a seed."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self._position, self._over = Position(0, 0), False
        self._planes = np.zeros((ROWS, COLUMNS, 2), dtype=np.int8)
        self._heights = np.zeros(COLUMNS, dtype=np.int8)
        self._rewards = dict.fromkeys(self.agents, 0.0)
        for _ in range(int(self._rng.integers(self._opening + 1))):
            self.step(int(self._rng.choice(np.flatnonzero(self._heights < ROWS))))

    def last(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The observation, reward and flags of the player to move."""
        is_second = self.agent_selection == self.possible_agents[1]
        planes = self._planes[:, :, ::-1] if is_second else self._planes
        seen = {"observation": planes.copy(), "action_mask": (self._heights < ROWS).astype(np.int8)}
        return seen, self._rewards[self.agent_selection], self._over, False, {}

    def step(self, action: int | None) -> None:
        """Drop a stone; after the end each player leaves with None."""
        mover = self.agent_selection
        number = self.possible_agents.index(mover)
        other = self.possible_agents[1 - number]
        if action is None:
            self.agents.remove(mover)
        else:
            self._planes[ROWS - 1 - self._heights[action], action, number] = 1
            self._heights[action] += 1
            self._position = self._position.after(action)
            won = has_four(self._position.others)
            self._over = won or self._position.is_full
            self._rewards = {mover: float(won), other: -float(won)}
        self.agent_selection = other

    def close(self) -> None:
        """Do nothing."""


def has_four(board: int) -> bool:
    """True if a player with these stones has four in a line."""
    for shift in SHIFTS:
        pairs = board & board >> shift
        if pairs & pairs >> 2 * shift:
            return True
    return False


@cache
def lines() -> tuple[int, ...]:
    """The 69 lines of four fields, as boards."""
    found = []
    for shift in SHIFTS:
        line = sum(1 << shift * step for step in range(4))
        found += [line << start for start in range((ROWS + 1) * COLUMNS) if line << start & ~FULL == 0]
    return tuple(found)


def worth(position: Position) -> int:
    """The open lines of the player to move less those of the other one, by the number of stones in each."""
    total, (own, others) = 0, position
    for line in lines():
        mine, theirs = own & line, others & line
        if mine and not theirs:
            total += WORTH[mine.bit_count()]
        elif theirs and not mine:
            total -= WORTH[theirs.bit_count()]
    return total


def negamax(position: Position, depth: int, low: int, high: int) -> int:
    """The value for the player to move, exact between `low` and `high` (alpha-beta search); sooner wins are better."""
    if has_four(position.others):
        return -WON - depth
    if position.is_full:
        return 0
    if depth == 0:
        return worth(position)
    best = -2 * WON
    for column in position.moves:
        best = max(best, -negamax(position.after(column), depth - 1, -high, -max(low, best)))
        if best >= high:
            break
    return best


def best_moves(position: Position, depth: int = DEPTH) -> list[int]:
    """The moves of the greatest value after a search of so many plies."""
    # Each with the full window, so that ties are exact.
    values = {column: -negamax(position.after(column), depth - 1, -2 * WON, 2 * WON) for column in position.moves}
    return [column for column in sorted(values) if values[column] == max(values.values())]


def mcts_move(position: Position, simulations: int, seed: int) -> int:
    """The move of OpenSpiel's Monte Carlo tree search."""
    import pyspiel

    game = pyspiel.load_game("connect_four")
    evaluator = pyspiel.RandomRolloutEvaluator(1, seed)
    bot = pyspiel.MCTSBot(game, evaluator, UCT_C, simulations, MEGABYTES, True, seed, False)
    return int(bot.step(game.new_initial_state(spiel_state(position))))


def spiel_state(position: Position) -> str:
    """A position as OpenSpiel reads it: rows from the bottom, and x, who moves first, to move if stones are even."""
    stones = [board.bit_count() for board in position]
    marks = "xo" if stones[0] == stones[1] else "ox"
    rows = [
        [
            next((mark for mark, board in zip(marks, position, strict=True) if board >> 7 * column + height & 1), ".")
            for column in range(COLUMNS)
        ]
        for height in range(ROWS)
    ]
    return json.dumps({"board": rows, "current_player": marks[0], "is_terminal": False, "winner": ""})


Mover = Callable[[Position, np.random.Generator], int]
"""A move from a position, with a generator for what chance decides."""


def _random_move(position: Position, rng: np.random.Generator) -> int:
    return int(rng.choice(position.moves))


def _minimax_move(position: Position, rng: np.random.Generator) -> int:
    return int(rng.choice(best_moves(position)))


def _mcts(simulations: int) -> Mover:
    return lambda position, rng: mcts_move(position, simulations, int(rng.integers(2**31)))


OPPONENTS: Mapping[str, Mover] = {
    "random": _random_move,
    "minimax": _minimax_move,
    "mcts_100": _mcts(100),
    "mcts_1000": _mcts(1_000),
}
PAIRS = (
    ("minimax", "random"),
    ("mcts_100", "random"),
    ("mcts_1000", "mcts_100"),
    ("mcts_100", "minimax"),
    ("mcts_1000", "minimax"),
)
"""The opponents that `--validate` plays against each other."""


def _of_position(name: str) -> Player:
    """An opponent as a function of the position alone."""

    def player(observation: NDArray[Any], mask: NDArray[Any]) -> int:
        position = Position.of(observation)
        return OPPONENTS[name](position, np.random.default_rng([position.own, position.others]))

    return player


minimax, mcts_100, mcts_1000 = map(_of_position, ("minimax", "mcts_100", "mcts_1000"))


def play(sides: Sequence[Mover], opening: Sequence[int], rng: np.random.Generator) -> float:
    """The result of a game for the first of two sides, which has the first seat."""
    position, mover = Position(0, 0), 0
    for ply in range(ROWS * COLUMNS):
        column = opening[ply] if ply < len(opening) else sides[mover](position, rng)
        if column not in position.moves:
            raise ValueError(f"side {mover} plays column {column}, which is full")
        position, mover = position.after(column), 1 - mover
        if has_four(position.others):
            # The last move was made by the player who is not to move.
            return float(mover)
    return 0.5


def match(one: Mover, other: Mover, games: int, seed: int) -> dict[str, Any]:
    """The results of one side against another in so many games, half from each seat; an odd number is rounded up."""
    rng, own = np.random.default_rng(seed), np.zeros((-(-games // 2), 2))
    began = time.perf_counter()
    for pair in own:
        opening = rng.integers(COLUMNS, size=OPENING).tolist()
        pair[:] = play((one, other), opening, rng), 1 - play((other, one), opening, rng)
    return {
        "games": own.size,
        "seed": seed,
        **score_of(own),
        "seconds": round(time.perf_counter() - began, 1),
    }


def view_of(environment: Environment) -> Callable[[Position], NDArray[Any]]:
    """A position as a run's environment shows it to the player to move."""
    if environment.id != OPENSPIEL:
        return lambda position: position.observation
    game = make_open_spiel(environment)

    def view(position: Position) -> NDArray[Any]:
        state = game.game.new_initial_state(spiel_state(position))
        return game.view(state, state.current_player())

    return view


def mover_of(agent: LoadedAgent, sample: bool) -> Mover:
    """An agent as a side. Agents that remember earlier turns are not played: each call is a position of its own."""
    view = view_of(agent.config.environment)

    def move(position: Position, rng: np.random.Generator) -> int:
        mask = np.isin(np.arange(COLUMNS), position.moves)
        chosen, _ = agent.predict(view(position), action_mask=mask, deterministic=not sample)
        return int(chosen)

    return move


def trained(run: Path, generation: int | None) -> dict[str, Any]:
    """The steps of each agent and the seconds until a generation's end, by default the last one's."""
    rows = [row for row in read_run(run).metrics if generation in (None, row["generation"])]
    return {name: rows[-1][key] for name, key in (("steps", "agent_steps"), ("seconds", "wall_clock_seconds"))}


def main() -> None:
    """Play, and append a line for each pair of sides."""
    from records import append, revision

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="directories of runs")
    parser.add_argument("--generation", type=int, metavar="N", help="the elite of this checkpoint")
    parser.add_argument("--against", nargs="+", choices=tuple(OPPONENTS), default=tuple(OPPONENTS))
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--sample", action="store_true", help="let the agent sample its moves, as in training")
    parser.add_argument("--validate", action="store_true", help="play the opponents against each other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DATA)
    parsed = parser.parse_args()

    def told(one: str, mover: Mover, other: str, more: Mapping[str, Any]) -> None:
        line = {"player": one, "opponent": other, "revision": revision(), **more}
        line |= match(mover, OPPONENTS[other], parsed.games, parsed.seed)
        append(parsed.data, line)
        print(json.dumps(line), flush=True)

    for one, other in PAIRS if parsed.validate else ():
        told(one, OPPONENTS[one], other, {})
    for run in parsed.runs:
        agent = load(run, generation=parsed.generation)
        if agent.config.environment.id not in (PETTINGZOO, OPENSPIEL, OWN) or agent.config.network.recurrent:
            parser.error(f"{run}: is no run of {PETTINGZOO}, {OPENSPIEL} or {OWN} without recurrent agents")
        more = {
            "agent": agent.agent.id,
            "moves": "sampled" if parsed.sample else "greedy",
            "trained": trained(run, parsed.generation),
        }
        for other in parsed.against:
            told(run.name, mover_of(agent, parsed.sample), other, more)


if __name__ == "__main__":
    main()
