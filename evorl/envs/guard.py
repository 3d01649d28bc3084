"""One environment copy that survives errors of its own: `Guard` recreates it, and begins a new episode."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, create_empty_array, iterate
from numpy.typing import NDArray

from evorl.envs.closing import close_in_time
from evorl.envs.continuation import generator_state, set_generator_state
from evorl.envs.diagnosis import check_start, check_step, overwritten, refuse_old_interface
from evorl.envs.faults import FIRST, PASSED_ON, end_if_forked, fault, restart
from evorl.envs.spaces import MASK
from evorl.seeding import seed_global_generators
from evorl.system.plugins import place

Start = tuple[Any, dict[str, Any]]
"""The first observation of an episode, or of N of them, and the info of the reset."""
FINDING = "evorl.finding"
"""Info key of a copy's first reset or step: a finding on a result that is wrong but usable."""


def batchable(info: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an info as floats, and the action mask as one flat array; nothing reads the rest.

    Gymnasium gives a key's array the type that the first copy reports. That truncates 0.7 to 0 after an int, raises for
    a string or an array of another length, and turns a mask that is not an array into an array of objects. Conversion
    takes 2 of the 44 microseconds of a HalfCheetah step, and nothing where an info is empty.
    """
    found: dict[str, Any] = {}
    for key, value in info.items():
        if key == MASK:
            found[key] = flat_mask(value)
        elif isinstance(value, Mapping):
            found[key] = batchable(value)
        elif isinstance(value, int | float | np.bool_ | np.number):
            found[key] = float(value)
        elif isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
            found[key] = float(value.item())
    return found


def flat_mask(mask: Any) -> NDArray[np.bool_]:
    """The action mask of one copy [A], given as an array or as one for each part of the action."""
    parts = mask if isinstance(mask, list | tuple) else [mask]
    flat: NDArray[np.bool_] = np.concatenate([np.ravel(part) for part in parts]).astype(bool)
    return flat


class Guard(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that recreates an environment by `make` when it raises, and starts a new episode.

    The failed step then returns the new episode's first observation, with the error under `FAULT`. Only PASSED_ON
    propagates, so the other copies in a vector environment complete their steps. It tries up to `restarts` times in a
    row; the reader of `FAILURES` counts them over the run.

    An error in the first reset or step is retried once in a new environment with the same seed and action. If the same
    line raises the same error again, it is a bug that no restart fixes, and the info has `FIRST`.
    """

    def __init__(self, env: gym.Env[Any, Any], make: Callable[[], gym.Env[Any, Any]], restarts: int, name: str) -> None:
        super().__init__(env)
        self._make = make
        self._restarts = restarts
        self._name = name
        self._process = os.getpid()
        self._seed = 0
        self._is_open = True
        self._has_reset = self._has_stepped = False
        self._generator: Any = None
        self._shown: Any = None
        self._before: Any = None
        """A copy of `_shown` before the first step; None if its episode began by a restart or a replay."""
        self._shape = getattr(self.observation_space, "shape", None)
        """The shape of observations; None if they have parts."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            result = self._called(self.env.step, action)
            finding = None if self._has_stepped else self._checked_step(result)
            if self._is_suspect(result[0], ended=result[2] or result[3]):
                check_step(result, self.observation_space, self._name)
            result = (*result[:4], batchable(result[4]) | ({FINDING: finding} if finding else {}))
            self._shown = result[0]
        except PASSED_ON:
            raise
        except BaseException as error:
            if not self._has_stepped:
                refuse_old_interface(error, self.env, self._name, action)
            first = not self._has_stepped and self._is_raised_again(error, action)
            self._has_stepped = True
            observation, info = self._refused(error, "step") if first else self._another(error)
            return observation, 0.0, False, False, info
        self._has_stepped = True
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._seed = self._seed if seed is None else seed
        inner = self.env.unwrapped
        self._generator = generator_state(inner) if seed is None else None
        try:
            start = self._reset(seed, options)
            finding = None if self._has_reset else self._checked_start(start)
            observation, info = start
            if self._is_suspect(observation):
                check_start(start, self.observation_space, self._name)
            self._before = None if self._has_stepped else deepcopy(observation)
            info = batchable(info) | ({FINDING: finding} if finding else {})
        except PASSED_ON:
            raise
        except BaseException as error:
            if not self._has_reset:
                refuse_old_interface(error, self.env, self._name)
            first = not self._has_stepped and self._is_raised_again(error)
            return self._refused(error, "reset") if first else self._another(error)
        self._shown = observation
        return observation, info

    def _reset(self, seed: int | None, options: dict[str, Any] | None = None) -> Start:
        """Reset the environment, and with a seed also the global generators of this process."""
        if seed is not None:
            seed_global_generators(seed)
        _renew_world(self.env.unwrapped)
        start: Start = self._called(self.env.reset, seed=seed, options=options)
        return start

    def _called(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the environment, and end this process if it is a fork that came back."""
        try:
            return call(*arguments, **keywords)
        finally:
            end_if_forked(self._process, self._name)

    def _checked_start(self, start: Start) -> str:
        """A finding about the result of the first reset, or "". Raises UserError if it cannot be used."""
        finding = check_start(start, self.observation_space, self._name)
        self._has_reset = True
        return finding

    def _checked_step(self, result: Any) -> str:
        """A finding about the result of the first step, or "". Raises UserError if it cannot be used."""
        overwrites = self._before is not None and overwritten(self._shown, self._before)
        return check_step(result, self.observation_space, self._name, overwrites)

    def _is_suspect(self, observation: Any, ended: bool = False) -> bool:
        """True if an observation needs a check: it has the wrong shape, or has parts and is the last of an episode.

        Other observations are stacked, which fails on a wrong shape, but without naming the environment.
        """
        return ended if self._shape is None else np.shape(observation) != self._shape

    def close(self) -> None:
        """Close the environment. An exception or a hang is reported in one line."""
        if self._is_open:
            self._is_open = False
            close_in_time(self.env.close, self._name)

    def _begin_anew(self, seed: int) -> Start:
        """Recreate the environment; return the first observation of a new episode, and the info."""
        self._seed = seed
        self.close()
        self.env = self._make()
        self._is_open = True
        self._generator = self._before = None
        self._shown, info = self._reset(seed)
        return self._shown, batchable(info)

    def _is_raised_again(self, error: BaseException, action: Any = None) -> bool:
        """True if a new environment raises the same error at the same line, on reset or on this action."""
        try:
            self._begin_anew(self._seed)
            if action is not None:
                self.env.step(action)
        except PASSED_ON:
            raise
        except BaseException as another:
            return type(another) is type(error) and place(another) == place(error)
        return False

    @property
    def episode(self) -> tuple[dict[str, Any], Any]:
        """The running episode's origin, JSON-compatible, and the last observation.

        The origin is the seed of the reset, or the random generator state before a reset without a seed. It also holds
        the generator's current state, which a replay must reproduce.
        """
        now = generator_state(self.env.unwrapped)
        return {"seed": self._seed, "generator": self._generator, "now": now}, self._shown

    @episode.setter
    def episode(self, again: tuple[Mapping[str, Any], Sequence[Any]] | None) -> None:
        """Replay an episode, if given, from its origin and actions; if that fails, the last observation is None."""
        if again is None:
            return
        origin, actions = again
        self._seed, self._generator, self._shown = origin["seed"], origin["generator"], None
        self._before = None
        try:
            if self._generator is not None:
                set_generator_state(self.env.unwrapped, self._generator)
            shown, _ = self._reset(self._seed if self._generator is None else None)
            for action in actions:
                shown = self.env.step(action)[0]
            if origin.get("now") in (None, generator_state(self.env.unwrapped)):
                self._shown = shown
        except PASSED_ON:
            raise
        except BaseException:  # Environments and corrupt files may raise anything.
            return

    def _another(self, error: BaseException) -> Start:
        """Restart the environment; return the first observation of a new episode, and the info."""
        error, failures, start = restart(error, self._restarts, self._seed, self._begin_anew)
        observation, info = (self._placeholder(), {}) if start is None else start
        return observation, {**info, **fault(error, failures)}

    def _refused(self, error: BaseException, first: str) -> Start:
        """The result for an environment whose first `reset` or `step` always raises, which ends the run."""
        return self._placeholder(), {**fault(error, self._restarts + 1), FIRST: first}

    def _placeholder(self) -> Any:
        """An observation that nothing reads: after this many failures the run ends."""
        space = self.observation_space
        try:
            return space.sample()
        except OverflowError:  # A Box has bounds as wide as its type.
            return next(iter(iterate(batch_space(space, 1), create_empty_array(space, 1))))


def _renew_world(env: Any) -> None:
    """Give Gymnasium's BipedalWalker a new Box2D world for its next episode, as LunarLander does itself.

    In a reused world the order in which contacts are solved depends on all earlier episodes, so an episode would not be
    determined by its seed and actions.
    """
    if type(env).__module__ == "gymnasium.envs.box2d.bipedal_walker":
        env._destroy()
        env.world = type(env.world)()
