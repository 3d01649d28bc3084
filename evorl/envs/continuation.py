"""Running episodes that another process goes on with: what is kept of them, and how they are played again.

Axes: N copies of an environment, T steps.

A vector environment cannot be written to a file, but it can be brought to the same state again, by its kind:

- `GuardedEpisodes`: each copy of a `sync` or `async` environment is reset from the state that its random generator had
  when its episode began, and repeats the actions since.
- `AtariEpisodes`: the native implementation hides its generators, so that each copy is reset from the last seed that it
  was given, and repeats the actions since. It is given another seed when an episode begins long after the last one.
- `PlainEpisodes`: a native environment whose attributes are all numbers and arrays, as CartPole's, is those attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from evorl.envs.guard import another_seed, generator_state, set_generator_state
from evorl.envs.spec import choices
from evorl.types import Tensors, UserError

Vector = VectorEnv[Any, Any, Any]
Flags = NDArray[np.bool_]
SEED_LASTS = 20_000
"""Steps of a copy of a native Atari environment after which its next episode begins from a new seed. Seeding loads the
game anew, which takes as long as some 200 steps; playing again repeats at most so many steps and an episode."""
PLAIN = (bool, int, float, str, np.ndarray)
"""The types of the attributes of which a plain environment's state consists."""


class Journal:
    """The actions of N copies since the oldest of their beginnings, in a compact type."""

    def __init__(self, space: gym.Space[Any], copies: int) -> None:
        self._space = space
        self._type = np.dtype(space.dtype)
        if choices(space):
            low, high = _bounds(space)
            kinds = [np.iinfo(kind) for kind in ("int8", "int16", "int32", "int64")]
            self._type = next(kind.dtype for kind in kinds if kind.min <= low.min() and high.max() <= kind.max)
        self._rows = np.empty((256, copies, *(space.shape or ())), self._type)
        self._count = 0
        self._began = np.zeros(copies, dtype=np.int64)

    @property
    def ages(self) -> NDArray[np.int64]:
        """Return the number of actions [N] of each copy since its beginning."""
        return self._count - self._began

    @property
    def actions(self) -> NDArray[Any]:
        """Return the actions [T, N, ...] since the oldest beginning."""
        return self._rows[int(self._began.min()) : self._count]

    def add(self, actions: NDArray[Any]) -> None:
        """Note the actions [N, ...] of one step."""
        if self._count == len(self._rows):
            self._make_room()
        self._rows[self._count] = actions
        self._count += 1

    def begin(self, copies: Flags | slice) -> None:
        """Forget the actions of these copies so far."""
        self._began[copies] = self._count

    def restore(self, actions: NDArray[Any], ages: NDArray[np.int64]) -> None:
        """Take over actions [T, N, ...] and ages [N]. Raises UserError for what no journal of this space holds."""
        low, high = _bounds(self._space)
        whole = actions.shape[1:] == self._rows.shape[1:] and ages.shape == self._began.shape
        if not whole or (actions.dtype, ages.dtype) != (self._type, self._began.dtype):
            raise UserError(f"actions of shape {actions.shape} and type {actions.dtype} are not this environment's")
        if ages.min() < 0 or ages.max() != len(actions):
            raise UserError(f"{len(actions)} actions do not belong to episodes of {ages.min()} to {ages.max()} steps")
        # Comparisons with NaN are false.
        if not ((low <= actions) & (actions <= high)).all():
            raise UserError("an action is outside the environment's space")
        self._rows = np.concatenate([actions, np.empty((256, *self._rows.shape[1:]), self._type)])
        self._count = len(actions)
        self._began = self._count - ages

    def _make_room(self) -> None:
        """Drop the rows that nobody needs any more, and take more memory where few are dropped."""
        kept, first = self.actions, int(self._began.min())
        rows = np.empty((max(256, 2 * len(kept)), *kept.shape[1:]), self._type)
        rows[: len(kept)] = kept
        self._rows, self._count, self._began = rows, len(kept), self._began - first


class Continuation(Protocol):
    """What is kept of the running episodes of one kind of vector environment."""

    @property
    def kind(self) -> str:
        """Return the name of the kind."""

    @property
    def journal(self) -> Journal | None:
        """Return the actions that are needed to play episodes again, if any."""

    def reset(self, vector: Vector, seeds: Sequence[int]) -> None:
        """Note that all copies were reset from these seeds [N]."""

    def begin(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]] | None:
        """Note where episodes have begun [N]; return what the environment shows, where that is now something else."""

    def origins(self, vector: Vector) -> list[Any]:
        """Return what is kept of each copy beside its actions, as JSON has it."""

    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        """Bring copies back to where they were; return the observation of each, None where that failed.

        The journal has been restored. Raises whatever an environment or a file that lies makes fail.
        """

    def begin_anew(self, vector: Vector, copies: Flags, seed: int) -> list[Any]:
        """Begin another episode in these copies; return the first observation of each copy."""


class Continued(Protocol):
    """Environments whose running episodes another process can go on with."""

    @property
    def can_continue(self) -> bool:
        """Return whether their kind can be played again."""

    def state(self) -> Tensors:
        """Return what another process needs to go on with the running episodes; nothing where none can."""

    def restore(self, tensors: Tensors, seed: int) -> str:
        """Go on with the episodes that `state` described, by playing them again.

        Return in words which environments could not be brought to where they were; they begin new episodes, from
        `seed`. Raises UserError for what no environments like these could have described.
        """


class GuardedEpisodes:
    """Episodes in Gymnasium's own vector environments, whose copies are guarded."""

    kind = "guarded"

    def __init__(self, space: gym.Space[Any], copies: int) -> None:
        self.journal = Journal(space, copies)
        self._type = space.dtype

    def reset(self, vector: Vector, seeds: Sequence[int]) -> None:
        self.journal.begin(slice(None))

    def begin(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]] | None:
        self.journal.begin(copies)
        return None

    def origins(self, vector: Vector) -> list[Any]:
        return [origin for origin, _ in _asked(vector, "episode")]

    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        actions, ages = self.journal.actions.astype(self._type), self.journal.ages
        own = [list(actions[len(actions) - age :, copy]) for copy, age in enumerate(ages)]
        return self._set(vector, list(zip(origins, own, strict=True)))

    def begin_anew(self, vector: Vector, copies: Flags, seed: int) -> list[Any]:
        self.journal.begin(copies)
        origins = [{"seed": another_seed(seed + copy), "generator": None} for copy in range(len(copies))]
        return self._set(vector, [(origin, []) if new else None for origin, new in zip(origins, copies, strict=True)])

    def _set(self, vector: Vector, episodes: list[Any]) -> list[Any]:
        vector.set_attr("episode", episodes)  # type: ignore[attr-defined]
        return [shown for _, shown in _asked(vector, "episode")]


class AtariEpisodes:
    """Episodes in Atari's native vector environment, which takes a seed for each copy that it resets."""

    kind = "atari"

    def __init__(self, space: gym.Space[Any], copies: int) -> None:
        self.journal = Journal(space, copies)
        self._type = space.dtype
        self._seeds = [0] * copies

    def reset(self, vector: Vector, seeds: Sequence[int]) -> None:
        self._seeds = list(seeds)
        self.journal.begin(slice(None))

    def begin(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]] | None:
        due = copies & (self.journal.ages > SEED_LASTS)
        return self._seeded(vector, due, [another_seed(seed) for seed in self._seeds]) if due.any() else None

    def origins(self, vector: Vector) -> list[Any]:
        return list(self._seeds)

    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        actions, ages = self.journal.actions, self.journal.ages
        self._seeds = [int(seed) for seed in origins]
        shown = self._reset(vector, np.ones(len(self._seeds), dtype=bool))[0]
        for step, chosen in enumerate(actions):
            # A copy that was seeded later has been resting, or playing what nobody sees, until now.
            if step and (late := ages == len(actions) - step).any():
                self._reset(vector, late)
            shown = vector.step(chosen.astype(self._type))[0]
        if len(actions) and not ages.all():
            shown = self._reset(vector, ages == 0)[0]
        return list(shown)

    def begin_anew(self, vector: Vector, copies: Flags, seed: int) -> list[Any]:
        return list(self._seeded(vector, copies, [another_seed(seed + copy) for copy in range(len(copies))])[0])

    def _seeded(self, vector: Vector, copies: Flags, seeds: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Begin episodes in some copies from these seeds [N]."""
        both = zip(self._seeds, seeds, copies, strict=True)
        self._seeds = [new if begins else old for old, new, begins in both]
        self.journal.begin(copies)
        return self._reset(vector, copies)

    def _reset(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]]:
        return vector.reset(seed=np.array(self._seeds)[copies], options={"reset_mask": copies})  # type: ignore[arg-type]


class PlainEpisodes:
    """Episodes in a vector environment that is no more than its numbers, its arrays and its random generator."""

    kind = "plain"
    journal = None

    def reset(self, vector: Vector, seeds: Sequence[int]) -> None:
        """Do nothing: the environment knows where it stands."""

    def begin(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]] | None:
        return None

    def origins(self, vector: Vector) -> list[Any]:
        attributes = {
            name: {"type": str(value.dtype), "values": value.tolist()} if isinstance(value, np.ndarray) else value
            for name, value in _changing(vector).items()
        }
        return [{"attributes": attributes, "generator": generator_state(vector.unwrapped)}]

    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        (origin,) = origins
        here, kept = _changing(vector), origin["attributes"]
        if here.keys() != kept.keys():
            raise ValueError("it has other attributes")
        values = {name: _like(value, kept[name]) for name, value in here.items()}
        set_generator_state(vector.unwrapped, origin["generator"])
        for name, value in values.items():
            setattr(vector.unwrapped, name, value)
        return []

    def begin_anew(self, vector: Vector, copies: Flags, seed: int) -> list[Any]:
        return list(vector.reset(seed=seed % 2**31)[0])


def continuation(vector: Vector, copies: int, atari: bool) -> Continuation | None:
    """Return what is kept of the episodes of a vector environment; None for one whose state nobody knows."""
    space = vector.single_action_space
    if isinstance(vector, SyncVectorEnv | AsyncVectorEnv):
        return GuardedEpisodes(space, copies)
    if atari:
        return AtariEpisodes(space, copies)
    fixed = (gym.Space, EnvSpec, np.random.Generator, type(None))
    known = all(isinstance(value, (*PLAIN, *fixed)) for value in vars(vector.unwrapped).values())
    return PlainEpisodes() if known else None


def _bounds(space: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the lowest and the highest value of each number of an action."""
    if sizes := choices(space):
        start = np.asarray(space.start)
        return start, start + np.reshape(sizes, start.shape) - 1
    return space.low, space.high


def _asked(vector: Vector, name: str) -> tuple[Any, ...]:
    """Return an attribute of every copy."""
    values: tuple[Any, ...] = vector.get_attr(name)  # type: ignore[attr-defined]
    return values


def _changing(vector: Vector) -> dict[str, Any]:
    """Return the attributes of a plain environment that are numbers and arrays."""
    return {
        name: value
        for name, value in vars(vector.unwrapped).items()
        if isinstance(value, PLAIN) and name != "_np_random_seed"
    }


def _like(value: Any, kept: Any) -> Any:
    """Return what was kept of an attribute, in the shape and type that it has. Raises ValueError for anything else."""
    if not isinstance(value, np.ndarray):
        if type(kept) is not type(value):
            raise ValueError(f"{kept!r} is no {type(value).__name__}")
        return kept
    array = np.array(kept["values"], dtype=value.dtype).reshape(value.shape)
    if kept["type"] != str(value.dtype):
        raise ValueError(f"an array of {kept['type']} is none of {value.dtype}")
    return array
