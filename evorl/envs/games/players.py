"""The players of the other seat of a game: requests for moves, random players, and a user's function.

Axes: N' copies in which a seat is to move, A actions of all choices concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from evorl.config.fields import BENCHMARK
from evorl.envs.games.game import Spaces, Turn
from evorl.envs.spaces import batched, choices, finite_bounds, from_zero, to_zero
from evorl.system.plugins import described, imported
from evorl.types.outcomes import UserError
from evorl.types.tensors import Flags


class MoveRequest(NamedTuple):
    """A request for moves of the other seat in N' of the copies.

    `observation` is batched [N', ...] in the game's own space, `mask` [N', A] or None without masks, `copies` [N'] the
    copies' numbers, and `first` [N'] marks the first move of the seat in an episode.
    """

    observation: Any
    mask: Flags | None
    copies: NDArray[np.intp]
    first: Flags


def move_request(
    spaces: Spaces, masked: bool, turns: Sequence[Turn], copies: NDArray[np.intp], first: Flags
) -> MoveRequest:
    """A request for moves in these turns [N']; one that is over, or has no mask where others do, allows every move."""
    mask = None
    if masked:
        every = np.ones(sum(choices(spaces[1])), dtype=bool)
        mask = np.stack([every if turn.over or turn.mask is None else turn.mask for turn in turns])
    return MoveRequest(batched(spaces[0], [turn.observation for turn in turns]), mask, copies, first)


def game_move(space: gym.Space[Any], action: Any) -> Any:
    """A chosen action as games take it."""
    return int(action) if isinstance(space, gym.spaces.Discrete) else action


Opponents = Callable[[MoveRequest], NDArray[Any]]
"""Moves [N', ...] within the action space."""
OpponentFactory = Callable[[int], Opponents]
"""Makes opponents that fill this many seats."""


def reseed(opponents: object, seeds: Sequence[int]) -> None:
    """Seed opponents that move at random, by their method `begin`, with a seed for each copy, or one for all."""
    begin = getattr(opponents, "begin", None)
    if begin is not None:
        begin(seeds)


class RandomPlayers:
    """Opponents that draw each move uniformly from the allowed ones.

    Each copy of the game has a generator, so that its episodes depend on its seed and not on the other copies.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self._space = space
        self.begin([0])

    def begin(self, seeds: Sequence[int]) -> None:
        self._seeds, self._generators = seeds, dict[int, np.random.Generator]()

    def __call__(self, request: MoveRequest) -> NDArray[Any]:
        return random_moves(self._space, request.mask, list(map(self._generator, request.copies.tolist())))

    def _generator(self, copy: int) -> np.random.Generator:
        if copy not in self._generators:
            rounds, index = divmod(copy, len(self._seeds))
            self._generators[copy] = np.random.default_rng((self._seeds[index], rounds))
        return self._generators[copy]


def random_moves(space: gym.Space[Any], mask: Flags | None, generators: Sequence[np.random.Generator]) -> NDArray[Any]:
    """Moves [N', ...], each drawn uniformly from those that `mask` [N', A] allows, by a generator for each."""
    if isinstance(space, gym.spaces.Box) and space.dtype.kind in "iub":
        low, high, kind = space.low, space.high, space.dtype.type
        return np.stack([rng.integers(low, high, space.shape, dtype=kind, endpoint=True) for rng in generators])
    if isinstance(space, gym.spaces.Box):
        bounds = finite_bounds(space)
        return np.stack([rng.uniform(*bounds, space.shape) for rng in generators]).astype(space.dtype)
    sizes = choices(space)
    drawn = np.stack([rng.random(sum(sizes)) for rng in generators])
    if mask is not None:
        drawn *= mask
    parts = np.split(drawn, np.cumsum(sizes)[:-1], axis=1)
    moves = np.stack([part.argmax(1) for part in parts], axis=-1).reshape(len(drawn), *(space.shape or ()))
    return from_zero(moves, space)


class FunctionPlayers:
    """Opponents whose moves a user's function chooses; it receives an observation and its mask, or None."""

    def __init__(self, path: str, space: gym.Space[Any], actions: gym.Space[Any], key: str = BENCHMARK) -> None:
        """Import the function from its `path`, module:name, which `key` gave. Raises UserError."""
        self._path, self._space, self._actions, self._key = path, space, actions, key
        self._function = imported(key, path, "package.module:player")

    def __call__(self, request: MoveRequest) -> NDArray[Any]:
        """Moves [N', ...]. Raises UserError for one that is not allowed, or if the function raises."""
        moves = []
        for row, observation in enumerate(iterate(batch_space(self._space, len(request.copies)), request.observation)):
            mask = None if request.mask is None else request.mask[row]
            try:
                answer = np.asarray(self._function(observation, mask))
                move = answer.astype(self._actions.dtype)
            except Exception as error:
                raise UserError(f"{self._key}: {self._path} raised {described(error)}") from error
            is_rounded = bool(choices(self._actions)) and not np.array_equal(move, answer)
            if is_rounded or not is_allowed(move, mask, self._actions):
                raise UserError(f"{self._key}: {self._path} made the move {answer}, which is not allowed")
            moves.append(move)
        return np.stack(moves)


def is_allowed(move: Any, mask: Flags | None, space: gym.Space[Any]) -> bool:
    """True if a move is in the action space, and valid by the mask [A]."""
    if not space.contains(move):
        return False
    if mask is None or isinstance(space, gym.spaces.Box):
        return True
    ends = np.cumsum(choices(space))
    return bool(mask[to_zero(move, space).reshape(-1) + np.append(0, ends[:-1])].all())
