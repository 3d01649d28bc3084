"""Running episodes that outlive their process: what a checkpoint keeps of them, and their replay on resume.

Axes: N environment copies, T steps.

A vector environment cannot be serialised, but it can be brought back to the same state. How depends on its kind:

- `GuardedEpisodes`: each copy of a `sync` or `async` environment is reset with the random generator state from the
  start of its episode, and the episode's actions are replayed.
- `AtariEpisodes`: the native implementation hides its generators, so each copy is reset with its last seed, and all
  actions since then are replayed. A copy is reseeded when an episode starts long after its last seeding.
- `PlainEpisodes`: the state of a native environment whose attributes are all numbers and arrays, such as CartPole, is
  saved directly.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from evorl.envs.spaces import choices
from evorl.seeding import derive_seed
from evorl.types.tensors import Flags

Vector = VectorEnv[Any, Any, Any]
SEED_LASTS = 20_000
"""Steps after which a native Atari copy is reseeded at its next episode. Seeding reloads the game, which costs about
200 steps; a replay covers at most this many steps plus one episode."""
PLAIN = (bool, int, float, str, np.ndarray)
"""Types of the attributes that make up the state of a plain environment."""


def another_seed(seed: int) -> int:
    """The next seed of a copy of Atari that is seeded again; consecutive seeds belong to the other copies."""
    return derive_seed(seed, generation=0, rank=0, purpose="restart") % 2**31


def generator_state(env: Any) -> dict[str, Any]:
    """The JSON-compatible state of an environment's random generator; empty if it uses another generator.

    Atari environments have their own generator in C++.
    """
    generator = getattr(env, "np_random", None)
    if not isinstance(generator, np.random.Generator) or hasattr(env, "ale"):
        return {}
    state: dict[str, Any] = dict(generator.bit_generator.state)
    return state if state["bit_generator"] == "PCG64" else json.loads(json.dumps(state, default=np.ndarray.tolist))


def set_generator_state(env: Any, state: Mapping[str, Any]) -> None:
    """Set the state of an environment's random generator. Raises NumPy's errors for an invalid state."""
    if not state:
        raise ValueError("the state of this environment's random generator is not known")
    env.np_random.bit_generator.state = dict(state)


class Journal:
    """The actions of N copies since their start points, in a compact dtype."""

    def __init__(self, space: gym.Space[Any], copies: int) -> None:
        self._type = _compact_type(space)
        self._shape = (copies, *(space.shape or ()))
        self._log: list[NDArray[Any]] = []
        self.ages = np.zeros(copies, dtype=np.int64)
        """The number of actions [N] of each copy since its start point."""

    @property
    def actions(self) -> NDArray[Any]:
        """The actions [T, N, ...] since the oldest start point."""
        return np.array(self._log, self._type).reshape(-1, *self._shape)

    def add(self, actions: NDArray[Any]) -> None:
        self._log.append(actions.astype(self._type))
        self.ages += 1

    def begin(self, copies: Flags | slice) -> None:
        """Set the start point of these copies to now; their earlier actions are no longer needed."""
        self.ages[copies] = 0
        del self._log[: len(self._log) - int(self.ages.max())]

    def state_dict(self) -> dict[str, NDArray[Any]]:
        return {"actions": self.actions, "ages": self.ages}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load the output of `state_dict`, of checked shapes and dtypes."""
        self._log, self.ages = list(state["actions"]), state["ages"].copy()


def _compact_type(space: Any) -> Any:
    """The narrowest signed type of the actions of a discrete space; that of any other space."""
    if not (sizes := choices(space)):
        return space.dtype
    low = np.asarray(space.start, dtype=np.int64).reshape(-1)
    high = low + np.array(sizes) - 1
    return np.min_scalar_type(min(low.min(), -1 - high.max()))


class Continuation(ABC):
    """Saves and replays the running episodes of one kind of vector environment."""

    kind: ClassVar[str]
    """The name of the kind, as stored in checkpoints."""
    journal: Journal | None = None
    """The actions to replay, or None if the state is saved instead."""

    def reset(self, seeds: Sequence[int]) -> None:
        """Record that all copies were reset with these seeds [N]."""
        if self.journal is not None:
            self.journal.begin(slice(None))

    def begin(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]] | None:
        """Record where episodes started [N]; return new observations and info if copies were reset again, else None."""
        return None

    @abstractmethod
    def origins(self, vector: Vector) -> list[Any]:
        """The JSON-compatible start state of each copy, without its actions."""

    @abstractmethod
    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        """Restore the copies by replay; return the observation of each copy, or None where its replay failed.

        The journal must be restored first. Propagates any exception from an environment or a corrupt file.
        """


class GuardedEpisodes(Continuation):
    """Episodes in Gymnasium's SyncVectorEnv or AsyncVectorEnv, whose copies are wrapped in GuardedEnv."""

    kind = "guarded"
    journal: Journal

    def __init__(self, space: gym.Space[Any], copies: int) -> None:
        self.journal = Journal(space, copies)
        self._type = space.dtype

    def begin(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]] | None:
        self.journal.begin(copies)
        return None

    def origins(self, vector: Vector) -> list[Any]:
        return [origin for origin, _ in _episodes(vector)]

    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        actions, ages = self.journal.actions.astype(self._type), self.journal.ages
        recent_actions = [list(actions[len(actions) - age :, copy]) for copy, age in enumerate(ages)]
        vector.set_attr("episode", list(zip(origins, recent_actions, strict=True)))  # type: ignore[attr-defined]
        return [observation for _, observation in _episodes(vector)]


def _episodes(vector: Vector) -> Any:
    """The origin and the last observation of each copy's running episode."""
    return vector.get_attr("episode")  # type: ignore[attr-defined]


class AtariEpisodes(Continuation):
    """Episodes in Atari's native vector environment, which takes a seed for each copy that it resets."""

    kind = "atari"
    journal: Journal

    def __init__(self, space: gym.Space[Any], copies: int) -> None:
        self.journal = Journal(space, copies)
        self._type = space.dtype
        self._seeds = [0] * copies

    def reset(self, seeds: Sequence[int]) -> None:
        super().reset(seeds)
        self._seeds = list(seeds)

    def origins(self, vector: Vector) -> list[Any]:
        return list(self._seeds)

    def begin(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]] | None:
        due = copies & (self.journal.ages > SEED_LASTS)
        if not due.any():
            return None
        self._seeds = [another_seed(seed) if is_due else seed for seed, is_due in zip(self._seeds, due, strict=True)]
        self.journal.begin(due)
        return self._reset(vector, due)

    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        actions, ages = self.journal.actions, self.journal.ages
        self._seeds = [int(seed) for seed in origins]
        shown = self._reset(vector, np.ones(len(self._seeds), dtype=bool))[0]
        for step, chosen in enumerate(actions):
            # A copy seeded later has been idle until now, or stepped with unused results.
            if step and (late := ages == len(actions) - step).any():
                self._reset(vector, late)
            shown = vector.step(chosen.astype(self._type))[0]
        if len(actions) and not ages.all():
            shown = self._reset(vector, ages == 0)[0]
        return list(shown)

    def _reset(self, vector: Vector, copies: Flags) -> tuple[Any, dict[str, Any]]:
        return vector.reset(seed=np.array(self._seeds)[copies], options={"reset_mask": copies})  # type: ignore[arg-type]


class PlainEpisodes(Continuation):
    """Episodes in a vector environment whose whole state is its numbers, arrays and random generator."""

    kind = "plain"

    def origins(self, vector: Vector) -> list[Any]:
        attributes = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in _changing(vector).items()
        }
        return [{"attributes": attributes, "generator": generator_state(vector.unwrapped)}]

    def play(self, vector: Vector, origins: Sequence[Any]) -> list[Any]:
        (origin,) = origins
        here, saved = _changing(vector), origin["attributes"]
        if here.keys() != saved.keys():
            raise ValueError("it has other attributes")
        values = {name: _like(value, saved[name]) for name, value in here.items()}
        set_generator_state(vector.unwrapped, origin["generator"])
        for name, value in values.items():
            setattr(vector.unwrapped, name, value)
        return []


def continuation(vector: Vector, copies: int, atari: bool) -> Continuation | None:
    """The Continuation for a vector environment, or None if its state cannot be saved."""
    space = vector.single_action_space
    if isinstance(vector, SyncVectorEnv | AsyncVectorEnv):
        return GuardedEpisodes(space, copies)
    if atari:
        return AtariEpisodes(space, copies)
    return PlainEpisodes() if is_plain(vector) else None


def is_plain(vector: Vector) -> bool:
    """True if a native environment holds only numbers, strings and arrays, besides spaces, its spec and generator.

    A wrapper may hold more.
    """
    fixed = (gym.Space, EnvSpec, np.random.Generator, type(None))
    return vector.unwrapped is vector and all(
        value.dtype.kind in "biufUS" if isinstance(value, np.ndarray) else isinstance(value, (*PLAIN, *fixed))
        for value in vars(vector).values()
    )


def _changing(vector: Vector) -> dict[str, Any]:
    """The numeric, string and array attributes of a plain environment."""
    return {
        name: value
        for name, value in vars(vector.unwrapped).items()
        if isinstance(value, PLAIN) and name != "_np_random_seed"
    }


def _like(value: Any, saved: Any) -> Any:
    """A saved attribute with the current shape and dtype. Raises ValueError if it does not fit."""
    if isinstance(value, np.ndarray):
        return np.array(saved, dtype=value.dtype).reshape(value.shape)
    return type(value)(saved)
