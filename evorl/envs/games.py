"""Two-player games (PettingZoo, arXiv 2009.14471; OpenSpiel) as vector environments of the learner's seat.

Axes: N copies of a game, A actions of all choices concatenated.

A game is turn-based (PettingZoo's AEC interface, OpenSpiel) or simultaneous (PettingZoo's parallel interface).
`GameVector` makes the learner's move in each copy, then asks `opponents` for moves in all copies where the other seat
is to move, until it is the learner's turn in each copy or a new episode has begun. So a transition spans two of the
learner's turns: its reward is the sum of its seat's rewards until its next turn, and the last observation is the
learner's, whichever seat made the final move. After `play_both_seats` every move is the learner's, and the next
observation is the other seat's.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.config.errors import nearest, shown
from evorl.config.fields import BENCHMARK
from evorl.envs.closing import close_in_time
from evorl.envs.continuation import another_seed
from evorl.envs.faults import FAILURES, PASSED_ON, check_observation, check_spaces, fault, restart
from evorl.envs.open_spiel import OPENSPIEL, make_open_spiel
from evorl.envs.spaces import MASK, choices, finite_bounds, from_zero, to_zero
from evorl.envs.turns import Game, Spaces, Turn
from evorl.seeding import seed_global_generators
from evorl.system.extras import install_command
from evorl.system.plugins import described, import_from_here, imported, place, without_place
from evorl.types import Flags, UserError

PETTINGZOO = "pettingzoo"
FAMILIES = ("classic", "butterfly", "sisl", "atari")
"""PettingZoo's packages of games."""
ENTRIES = ("parallel_env", "raw_env", "env")
"""Names under which a module of PettingZoo has its game, the preferred first. `env` wraps `raw_env` in checks of each
move that halve its speed; masked moves are legal."""
RESULT = "result"
"""Info key of an episode's result so far: 1 for the seat that got more, 0 for the other, 0.5 if equal."""
MODES, TEXT = "render_modes", "ansi"
"""The key of a game's metadata that names the ways in which it can be shown, and the one that is text."""
ROUNDING = 1e-6
"""How far the rewards of a zero-sum episode may be from a sum of 0."""
SEEN = ("observation", "reward", "termination", "truncation", "info")
ALL_SEEN = ("observations", "rewards", "terminations", "truncations", "infos")
"""What PettingZoo's `last` and parallel `step` return."""
MAX_EMPTY = 1_000
"""Episodes in a row that may end before the learner's first turn."""


class _Seats:
    """The base class of games with one of PettingZoo's interfaces: the names of their seats, and the newest turns."""

    hides = False  # PettingZoo does not declare whether information is hidden.

    def __init__(self, env: Any, names: Sequence[str], id: str) -> None:
        self.env, self.names, self._id = env, list(names), id
        self.acting: tuple[int, ...] = ()
        self.seen: dict[int, Turn] = {}
        self._received = [0.0, 0.0]
        """The sum of the rewards that each seat has been given in this episode."""

    @property
    def totals(self) -> list[float]:
        return list(self._received)

    def spaces(self) -> Spaces:
        return spaces_of(self.env, self._id)

    def text(self, seat: int) -> str | None:
        modes = (getattr(self.env, "metadata", None) or {}).get(MODES, ())
        # A game that names modes, but not this one, would warn that it cannot be shown.
        if not hasattr(self.env, "render") or (modes and TEXT not in modes):
            return None
        try:
            text = self.env.render()
        except NotImplementedError:  # PettingZoo's base classes have a `render` that raises.
            return None
        return text if isinstance(text, str) else None

    def close(self) -> None:
        self.env.close()

    def _given(self, method: str, result: Any, parts: Sequence[str]) -> tuple[Any, ...]:
        """The result of a method, which must be a tuple of these parts. Raises UserError if it is none."""
        if not isinstance(result, tuple | list) or len(result) != len(parts):
            count = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
            raise UserError(
                f"environment.id: {method} of {self._id} returns {count}; PettingZoo's interface wants "
                f"({', '.join(parts)})"
            )
        return tuple(result)

    def _note(
        self, name: str, observation: Any, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> int:
        """Note what a seat sees; return its number."""
        if name not in self.names:
            raise UserError(f"environment.id: {self._id} lets {shown(name)} move, which is not in possible_agents")
        seat = self.names.index(name)
        mask = info.get(MASK)
        if isinstance(observation, Mapping) and MASK in observation:
            mask = observation[MASK]
            rest = {key: value for key, value in observation.items() if key != MASK}
            observation = next(iter(rest.values())) if len(rest) == 1 else rest
        allowed = None if mask is None else np.asarray(mask, dtype=bool).reshape(-1)
        self.seen[seat] = Turn(observation, allowed, float(reward), bool(terminated), bool(truncated))
        self._received[seat] += float(reward)
        return seat


class TurnBased(_Seats):
    """A game with PettingZoo's AEC interface: one seat moves at a time."""

    @property
    def totals(self) -> list[float]:
        # A waiting seat is given its reward at its next turn; until then PettingZoo's base class keeps it here.
        pending: Mapping[str, float] = getattr(self.env, "_cumulative_rewards", {})
        return [
            received if seat in self.acting else received + float(pending.get(name, 0.0))
            for seat, (name, received) in enumerate(zip(self.names, self._received, strict=True))
        ]

    def reset(self, seed: int) -> None:
        self.seen, self._received = {}, [0.0, 0.0]
        seed_global_generators(seed)
        self.env.reset(seed=seed)
        self._settle()

    def step(self, actions: Mapping[int, Any]) -> None:
        self.env.step(actions[self.acting[0]])
        self._settle()

    def _settle(self) -> None:
        """Record the view of the seat to move, after removing seats whose game is over.

        Raises UserError if one of these stays in the game.
        """
        for _ in range(1 + len(self.names)):
            if not self.env.agents:
                self.acting = ()
                return
            name = self.env.agent_selection
            seat = self._note(name, *self._given("last", self.env.last(), SEEN))
            if not self.seen[seat].over:
                self.acting = (seat,)
                return
            self.env.step(None)
        raise UserError(
            f"environment.id: step(None) of {self._id} does not remove an agent whose game is over from `agents`, as "
            "PettingZoo's `_was_dead_step` does"
        )


class Simultaneous(_Seats):
    """A game with PettingZoo's parallel interface: all seats move at once."""

    def reset(self, seed: int) -> None:
        self.seen, self._received = {}, [0.0, 0.0]
        seed_global_generators(seed)
        observations, infos = self._given("reset", self.env.reset(seed=seed), ("observations", "infos"))
        for name in self.env.agents:
            self._note(name, observations[name], 0.0, False, False, infos.get(name, {}))
        self._settle()

    def step(self, actions: Mapping[int, Any]) -> None:
        by_name = {self.names[seat]: action for seat, action in actions.items()}
        observations, rewards, terminated, truncated, infos = self._given("step", self.env.step(by_name), ALL_SEEN)
        for name in by_name:
            self._note(name, observations[name], rewards[name], terminated[name], truncated[name], infos.get(name, {}))
        self._settle()

    def _settle(self) -> None:
        self.acting = tuple(seat for seat, turn in sorted(self.seen.items()) if not turn.over)


class MoveRequest(NamedTuple):
    """A request for moves of the other seat in N' of the copies.

    `observation` is batched [N', ...] in the game's own space, `mask` [N', A] or None without masks, `copies` [N'] the
    copies' numbers, and `first` [N'] marks the first move of the seat in an episode.
    """

    observation: Any
    mask: Flags | None
    copies: NDArray[np.intp]
    first: Flags


Opponents = Callable[[MoveRequest], NDArray[Any]]
"""Moves [N', ...] within the action space."""
OpponentFactory = Callable[[int], Opponents]
"""Makes opponents that fill this many seats."""


@runtime_checkable
class Seeded(Protocol):
    """Opponents that draw from a random generator of their own, which a reset of the games seeds anew."""

    def begin(self, seed: int) -> None:
        """Seed the generator."""


def reseed(opponents: object, seed: int) -> None:
    """Seed opponents that draw; others stay as they are."""
    if isinstance(opponents, Seeded):
        opponents.begin(seed)


class RandomPlayers:
    """Opponents that draw each move uniformly from the allowed ones."""

    def __init__(self, space: gym.Space[Any], rng: np.random.Generator) -> None:
        self._space, self._rng = space, rng

    def begin(self, seed: int) -> None:
        """Seed the generator."""
        self._rng = np.random.default_rng(seed)

    def __call__(self, asked: MoveRequest) -> NDArray[Any]:
        space, count = self._space, len(asked.copies)
        if isinstance(space, gym.spaces.Box) and space.dtype.kind in "iub":
            size = (count, *space.shape)
            return self._rng.integers(space.low, space.high, size, dtype=space.dtype.type, endpoint=True)
        if isinstance(space, gym.spaces.Box):
            return self._rng.uniform(*finite_bounds(space), (count, *space.shape)).astype(space.dtype)
        sizes = choices(space)
        drawn = self._rng.random((count, sum(sizes)))
        if asked.mask is not None:
            drawn *= asked.mask
        parts = np.split(drawn, np.cumsum(sizes)[:-1], axis=1)
        moves = np.stack([part.argmax(1) for part in parts], axis=-1).reshape(count, *(space.shape or ()))
        return from_zero(moves, space)


class FunctionPlayers:
    """Opponents whose moves a user's function chooses; it receives an observation and its mask, or None."""

    def __init__(self, path: str, space: gym.Space[Any], actions: gym.Space[Any], key: str = BENCHMARK) -> None:
        """Import the function from its `path`, module:name, which `key` gave. Raises UserError."""
        self._path, self._space, self._actions, self._key = path, space, actions, key
        self._function = imported(key, path, "package.module:player")

    def __call__(self, asked: MoveRequest) -> NDArray[Any]:
        """Moves [N', ...]. Raises UserError for one that is not allowed, or if the function raises."""
        moves = []
        for row, observation in enumerate(iterate(batch_space(self._space, len(asked.copies)), asked.observation)):
            mask = None if asked.mask is None else asked.mask[row]
            try:
                given = np.asarray(self._function(observation, mask))
                move = given.astype(self._actions.dtype)
            except Exception as error:
                raise UserError(f"{self._key}: {self._path} raised {described(error)}") from error
            is_rounded = bool(choices(self._actions)) and not np.array_equal(move, given)
            if is_rounded or not is_allowed(move, mask, self._actions):
                raise UserError(f"{self._key}: {self._path} made the move {given}, which is not allowed")
            moves.append(move)
        return np.stack(moves)


class GameVector(VectorEnv[Any, Any, Any]):
    """N copies of a game, each from one seat, with same-step autoreset.

    `seats` [N] are the learner's. The first episode after a reset with seed s has it in seat s % 2, and seats alternate
    from episode to episode. `opponents` move for the other seat, at random until others are set. After
    `play_both_seats`, `seats` are those that are to move, and there are no opponents.
    """

    def __init__(self, settings: Environment, copies: int) -> None:
        """Make the copies. Raises UserError for a game that evorl cannot play."""
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = copies
        self._settings, self._id = settings, settings.id
        self.games: list[Game] = []
        try:
            for _ in range(copies):
                self.games.append(make_game(settings))
            self.single_observation_space, self.single_action_space = self.games[0].spaces()
        except BaseException:
            self.close()
            raise
        self.observation_space = batch_space(self.single_observation_space, copies)
        self.action_space = batch_space(self.single_action_space, copies)
        self.seats = np.zeros(copies, dtype=np.int64)
        self._seeds = [np.random.default_rng(copy) for copy in range(copies)]
        self.opponents: Opponents = RandomPlayers(self.single_action_space, np.random.default_rng(0))
        self._is_checked = self._is_masked = False
        self._has_moved = np.zeros((2, copies), dtype=bool)
        """The copies in which the learner, and the other seat, have moved in the running episode."""
        self._ended: dict[int, tuple[Turn, float]] = {}
        """The learner's last turn, and the result, in the copies whose episode has ended in this step."""
        self._faults: dict[int, dict[str, Any]] = {}
        """The info entries of the copies that have raised in this step or reset."""
        self._plays_both = False
        self._gains = np.zeros(copies)
        """With both seats, what the seat that moved last gained by that move."""

    def play_both_seats(self) -> None:
        """Let the learner move in both seats. Raises UserError for a game of imperfect information, as far as known."""
        if self.games[0].hides:
            raise self._unfit("perfect information, since values of one seat are learned from those of the other")
        self._plays_both = True

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every copy: copy i with `seed` + i, or with seeds [N]."""
        first = [(seed or 0) + copy for copy in range(self.num_envs)] if not isinstance(seed, Sequence) else list(seed)
        self._seeds = [np.random.default_rng(each) for each in first]
        reseed(self.opponents, another_seed(first[0]))
        self._faults = {}
        # `_begin` takes the other seat.
        self.seats = np.array([1 - each % 2 for each in first], dtype=np.int64)
        for copy, each in enumerate(first):
            self._begin(copy, each % 2**31)
        self._advance()
        return self._shown()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Move with the learner, then with the other seat until the learner is to move again."""
        self._ended, self._faults = {}, {}
        rewards = self._step_both_seats(actions) if self._plays_both else self._step_own_seat(actions)
        rewards[[copy for copy in self._faults if copy not in self._ended]] = 0.0
        ended = np.zeros(self.num_envs, dtype=bool)
        ended[list(self._ended)] = True
        terminated, truncated = ended.copy(), np.zeros(self.num_envs, dtype=bool)
        for copy, (turn, _) in self._ended.items():
            terminated[copy], truncated[copy] = turn.terminated, turn.truncated
        observation, info = self._shown()
        # Evaluation may cut an episode off, and then counts who is ahead.
        results = np.array([self._result(copy) for copy in range(self.num_envs)])
        info |= {RESULT: results, f"_{RESULT}": np.ones(self.num_envs, dtype=bool)}
        if ended.any():
            info |= self._last(ended)
        return observation, rewards, terminated, truncated, info

    def _step_own_seat(self, actions: Any) -> NDArray[np.float64]:
        """Move with the learner, then with the other seat until the learner is to move again; the rewards [N]."""
        both = [copy for copy, game in enumerate(self.games) if len(game.acting) == 2]
        replies = dict(zip(both, self._ask(both), strict=True))
        for copy in range(self.num_envs):
            seat = int(self.seats[copy])
            moves = {seat: self._move(actions[copy])}
            if copy in replies:
                moves[1 - seat] = self._move(replies[copy])
            self._has_moved[0, copy] = True
            self._play(copy, moves)
        self._advance()
        turns = [self._ended[copy][0] if copy in self._ended else self._turn(copy) for copy in range(self.num_envs)]
        return np.array([turn.reward for turn in turns], dtype=np.float64)

    def _step_both_seats(self, actions: Any) -> NDArray[np.float64]:
        """Move with the seat that is to move in each copy; what each of these gained by its move [N].

        Raises UserError for a game whose seats do not move in turn, or that is not zero-sum.
        """
        rewards = np.zeros(self.num_envs)
        for copy in range(self.num_envs):
            mover = int(self.seats[copy])
            self._play(copy, {mover: self._move(actions[copy])})
            if copy in self._faults:
                continue
            game = self.games[copy]
            if game.acting not in ((), (1 - mover,)):
                raise self._unfit("seats that move in turn")
            other = game.seen.get(1 - mover)
            if other is None or not (game.acting or other.over):
                raise self._untold()
            # A turn's reward covers two moves: that seat's own last one, and the reply to it, which was made just now.
            rewards[copy] = self._gains[copy] = self._gains[copy] - other.reward
            if game.acting:
                self.seats[copy] = 1 - mover
                continue
            if abs(sum(game.totals)) > ROUNDING:
                gave = " and ".join(f"{total:g}" for total in game.totals)
                raise self._unfit(f"a zero-sum game, and an episode gave {gave}")
            # Copied, since the next episode may overwrite what the game has given.
            self._ended[copy] = deepcopy(other), self._result(copy)
            self._begin(copy)
        return rewards

    def _unfit(self, wanted: str) -> UserError:
        return UserError(f"league.learn_from: both needs {wanted} ({self._id}); use own")

    def close(self, **kwargs: Any) -> None:
        """Close all copies, then raise the first error, if there was one."""
        errors = []
        for game in self.games:
            try:
                game.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def take_over(self, before: VectorEnv[Any, Any, Any]) -> None:
        """Keep the opponents of the vector that this one replaces, or play both seats if that one did."""
        if isinstance(before, GameVector):
            self._plays_both = before._plays_both
            if not isinstance(before.opponents, RandomPlayers):
                self.opponents = before.opponents

    def _turn(self, copy: int) -> Turn:
        return self.games[copy].seen[int(self.seats[copy])]

    def _move(self, action: Any) -> Any:
        return int(action) if isinstance(self.single_action_space, gym.spaces.Discrete) else action

    def _begin(self, copy: int, seed: int | None = None) -> None:
        """Begin an episode, with the learner in the other seat."""
        self.seats[copy] = 1 - self.seats[copy]
        seed = int(self._seeds[copy].integers(2**31)) if seed is None else seed
        try:
            self._start(copy, seed)
        except PASSED_ON:
            raise
        except BaseException as error:
            self._start_over(copy, error, seed)

    def _play(self, copy: int, moves: Mapping[int, Any]) -> None:
        """Step one copy. If it raises, its episode is dropped and the copy recreated; the other copies go on."""
        try:
            self.games[copy].step(moves)
        except PASSED_ON:
            raise
        except BaseException as error:
            self._start_over(copy, error, int(self._seeds[copy].integers(2**31)))

    def _start_over(self, copy: int, error: BaseException, seed: int) -> None:
        """Begin an episode in a new copy, from the same seat, in place of one that raised.

        Raises the last error if it has raised more often in this step than a copy may in a run.
        """

        def begin_anew(seed: int) -> None:
            close_in_time(self.games[copy].close, self._id)
            self.games[copy] = make_game(self._settings)
            self._start(copy, seed)

        most = self._settings.max_restarts
        before = self._faults[copy][FAILURES] if copy in self._faults else 0
        error, failures, _ = restart(error, most - before, seed, begin_anew)
        if before + failures > most:
            raise error
        self._faults[copy] = fault(error, before + failures)

    def _start(self, copy: int, seed: int) -> None:
        """Reset one copy, with the learner in the seat that is noted."""
        self._has_moved[:, copy] = False
        game = self.games[copy]
        game.reset(seed)
        if self._plays_both:
            if len(game.acting) != 1:
                raise self._unfit("seats that move in turn")
            self.seats[copy], self._gains[copy] = game.acting[0], 0.0
        if not self._is_checked:
            (_seat, turn), *_ = game.seen.items()
            check_observation(
                turn.observation, self.single_observation_space, f"environment.id: the reset of {self._id} returns"
            )
            self._is_checked, self._is_masked = True, turn.mask is not None

    def _advance(self) -> None:
        """Go on in all copies until the learner is to move, beginning new episodes where one has ended."""
        waiting, empty = list(range(self.num_envs)), 0
        while waiting:
            for copy in waiting:
                while self._is_over(copy):
                    if self._has_moved[0, copy]:
                        self._ended[copy] = deepcopy(self._turn(copy)), self._result(copy)
                    elif (empty := empty + 1) > MAX_EMPTY * self.num_envs:
                        raise UserError(f"environment.id: {self._id} ends before one of its seats has ever moved")
                    self._begin(copy)
            waiting = [copy for copy in waiting if self.seats[copy] not in self.games[copy].acting]
            for copy, reply in zip(waiting, self._ask(waiting), strict=True):
                self._play(copy, {1 - int(self.seats[copy]): self._move(reply)})

    def _is_over(self, copy: int) -> bool:
        """True if the learner's game has ended."""
        game, seat = self.games[copy], int(self.seats[copy])
        over = seat in game.seen and game.seen[seat].over
        if not over and not game.acting:
            raise self._untold()
        return over

    def _untold(self) -> UserError:
        return UserError(
            f"environment.id: {self._id} ended without a last turn for each of its seats; an agent that is done stays "
            "in `agents` until its last turn, with terminations or truncations set"
        )

    def _result(self, copy: int) -> float:
        totals, seat = self.games[copy].totals, int(self.seats[copy])
        return result_of(totals[seat], totals[1 - seat])

    def _ask(self, copies: Sequence[int]) -> Any:
        """The other seat's moves in these copies."""
        if not copies:
            return []
        turns = [self.games[copy].seen[1 - int(self.seats[copy])] for copy in copies]
        chosen = np.array(copies, dtype=np.intp)
        first = ~self._has_moved[1, chosen]
        self._has_moved[1, chosen] = True
        return self.opponents(MoveRequest(self._batched(turns), self._masks(turns), chosen, first))

    def _batched(self, turns: Sequence[Turn]) -> Any:
        return batched(self.single_observation_space, [turn.observation for turn in turns])

    def _masks(self, turns: Sequence[Turn]) -> Flags | None:
        """The masks of turns [N', A]; None if the game has none. Raises UserError if only some turns have one."""
        masks = [turn.mask for turn in turns if turn.mask is not None]
        if len(masks) != len(turns) * self._is_masked:
            first = "one" if self._is_masked else "none"
            raise UserError(
                f"environment.id: {self._id} gives an action mask in some turns, but {first} in its first; it must "
                "give one in each, or in none"
            )
        return np.stack(masks) if masks else None

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        """The learner's observations [N, ...], and the info with its masks."""
        turns = [self._turn(copy) for copy in range(self.num_envs)]
        masks = self._masks(turns)
        info = {} if masks is None else {MASK: masks, f"_{MASK}": np.ones(self.num_envs, dtype=bool)}
        for copy, told in self._faults.items():
            info = self._add_info(info, told, copy)
        return self._batched(turns), info

    def _last(self, ended: Flags) -> dict[str, Any]:
        """The info entries of the episodes that `ended` [N] in this step."""
        observations = np.full(self.num_envs, None, dtype=object)
        results = np.zeros(self.num_envs)
        final: dict[str, Any] = {RESULT: results, f"_{RESULT}": ended}
        if self._is_masked:
            # At the end of a game PettingZoo's mask is all zero and allows no choice, so such a turn has no mask.
            given = np.zeros(self.num_envs, dtype=bool)
            final |= {MASK: np.ones((self.num_envs, sum(choices(self.single_action_space))), dtype=bool)}
            final[f"_{MASK}"] = given
        for copy, (turn, result) in self._ended.items():
            observations[copy], results[copy] = turn.observation, result
            if self._is_masked and turn.mask is not None and turn.mask.any():
                final[MASK][copy], given[copy] = turn.mask, True
        return {"final_obs": observations, "_final_obs": ended, "final_info": final, "_final_info": ended}


def result_of(own: float, others: float) -> float:
    """The result of a seat that got `own` where the other got `others`: 1, 0.5 or 0."""
    return 1.0 if own > others else 0.5 if own == others else 0.0


def is_allowed(move: Any, mask: Flags | None, space: gym.Space[Any]) -> bool:
    """True if a move is in the action space, and valid by the mask [A]."""
    if not space.contains(move):
        return False
    if mask is None or isinstance(space, gym.spaces.Box):
        return True
    ends = np.cumsum(choices(space))
    return bool(mask[to_zero(move, space).reshape(-1) + np.append(0, ends[:-1])].all())


def batched(space: gym.Space[Any], observations: Sequence[Any]) -> Any:
    """Observations of a space as one batch [N', ...]."""
    if isinstance(space, gym.spaces.Box):
        return np.stack(observations).astype(space.dtype, copy=False)
    room: Any = create_empty_array(space, len(observations))
    return concatenate(space, observations, room)


def is_game(id: str) -> bool:
    """True for `pettingzoo:NAME`, `openspiel:NAME`, and a class of a module that follows an interface of PettingZoo."""
    module, _, name = id.rpartition(":")
    if not module or module in GAMES:
        return bool(module)
    try:
        factory = getattr(import_from_here(module), name, None)
    except ImportError:
        return False
    return isinstance(factory, type) and not issubclass(factory, gym.Env) and _has_agents(factory)


def _has_agents(kind: type) -> bool:
    """True for PettingZoo's environments, whose agents take turns or act in parallel."""
    declared = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    return any(hasattr(kind, name) or name in declared for name in ("possible_agents", "agent_iter"))


def make_game(settings: Environment) -> Game:
    """One copy of a game. Raises UserError if it cannot be made, or has other than two seats."""
    return GAMES.get(settings.id.rpartition(":")[0], _zoo_game)(settings)


def _zoo_game(settings: Environment) -> Game:
    """A game by one of PettingZoo's interfaces: one of its own, or a class of the user."""
    module, _, name = settings.id.rpartition(":")
    make = _entry(name) if module == PETTINGZOO else getattr(import_from_here(module), name)
    try:
        env = make(**settings.kwargs)
    except TypeError as error:
        raise UserError(
            f"environment.kwargs: {settings.id!r} does not accept these arguments: {described(error)}"
        ) from error
    except PASSED_ON:
        raise
    except BaseException as error:
        raise _failure(settings.id, error) from error
    try:
        seats = getattr(env, "possible_agents", None)
        if not isinstance(seats, list | tuple) or len(seats) != 2:
            told = "names no seats in `possible_agents`" if not seats else f"has {len(seats)} seats"
            raise UserError(f"environment.id: {settings.id} {told}; evorl plays games of two")
        wanted = ("reset", "step", "close", "observation_space", "action_space")
        if lacks := [each for each in wanted if not hasattr(env, each)]:
            raise UserError(f"environment.id: {settings.id} has no {lacks[0]}, which PettingZoo's interface asks for")
        kind = TurnBased if hasattr(env, "last") else Simultaneous
        return kind(env, seats, settings.id)
    except BaseException:
        if hasattr(env, "close"):
            env.close()
        raise


GAMES: Mapping[str, Callable[[Environment], Game]] = {PETTINGZOO: _zoo_game, OPENSPIEL: make_open_spiel}
"""Factories of games by the part of the id before the colon; any other part is a user's module, for `_zoo_game`."""


def spaces_of(env: Any, id: str) -> Spaces:
    """The observation space without its mask, and the action space. Raises UserError unless the seats are alike."""
    reasons = []
    for name in env.possible_agents:
        try:
            space, actions = env.observation_space(name), env.action_space(name)
        except Exception as error:
            raise _failure(id, error) from error
        reasons.append((_without_mask(space, id), actions))
    if reasons[0] != reasons[1]:
        raise UserError(
            f"environment.id: the seats of {id} have different spaces; one agent can play only seats that are alike"
        )
    observation, action = reasons[0]
    check_spaces(_Spaces(observation, action), id)
    return observation, action


class _Spaces(NamedTuple):
    """The spaces of a seat, as Gymnasium's environments have them."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


def _without_mask(space: gym.Space[Any], id: str) -> gym.Space[Any]:
    """A seat's observation space without its mask; if only one entry of a Dict is left, that entry's space."""
    if not isinstance(space, gym.spaces.Dict) or MASK not in space.spaces:
        return space
    rest = {name: inner for name, inner in space.spaces.items() if name != MASK}
    if not rest:
        raise UserError(f"environment.id: {id} shows nothing but the action mask")
    return next(iter(rest.values())) if len(rest) == 1 else gym.spaces.Dict(rest)


@cache
def _entry(name: str) -> Callable[..., Any]:
    """PettingZoo's game of this name. Raises UserError if there is none, or if a package that it needs is missing."""
    if find_spec(PETTINGZOO) is None:
        raise UserError(f"environment.id: {name!r} needs the PettingZoo extra: {install_command('games')}")
    module = _module(name)
    made: Callable[..., Any] = next(getattr(module, entry) for entry in ENTRIES if hasattr(module, entry))
    return made


def _module(name: str) -> ModuleType:
    # Not imported before it is known to be the one: each family needs packages of its own.
    specs = [spec for family in FAMILIES if (spec := find_spec(f"{PETTINGZOO}.{family}")) is not None]
    places = {each: spec.name for spec in specs for each in _games_in(spec.submodule_search_locations or ())}
    if name not in places:
        raise UserError(f"environment.id: PettingZoo has no game {name!r}{nearest(name, sorted(places))}")
    try:
        return importlib.import_module(f"{places[name]}.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"environment.id: {name!r} needs the module {error.name!r}, which PettingZoo's own extra "
            f"{places[name].rpartition('.')[2]} installs"
        ) from error
    except Exception as error:  # Some need a newer or an older version of another package.
        raise _failure(f"{PETTINGZOO}:{name}", error) from error


def _games_in(folders: Iterable[str]) -> list[str]:
    """The games of a family: modules that end in a version."""
    names = [each.name for each in pkgutil.iter_modules(list(folders))]
    return [name for name in names if name.rpartition("_v")[2].isdecimal()]


def _failure(id: str, error: BaseException) -> UserError:
    return UserError(f"environment.id: cannot make {id!r}: {without_place(error)}{place(error)}")
