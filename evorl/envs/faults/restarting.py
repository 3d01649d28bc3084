"""Copies of environments that begin anew after an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from evorl.envs.continuation import another_seed, generator_state, set_generator_state
from evorl.envs.faults.checks import batchable, check_start, check_step
from evorl.envs.faults.closing import close_in_time
from evorl.seeding import seed_global_generators
from evorl.system.plugins import described, place, without_place
from evorl.system.signals import note_activity, raise_if_signalled
from evorl.types.outcomes import UserError

Start = tuple[Any, dict[str, Any]]
"""The first observation of an episode, or of N of them, and the info of the reset."""
FAULT, SOURCE_LINES, FAILURES = "evorl.fault", "evorl.source_lines", "evorl.failures"
"""Info keys of a step or reset in which an environment raised: the last error, the user's source lines that led to it,
and the number of errors."""
PASSED_ON = (UserError, KeyboardInterrupt, SystemExit)
"""Exceptions that end the run wherever an environment raises them. Any other is a fault of that environment, also one
that is no Exception, as of a panic in Rust."""


def call_or_user_error(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call something of all copies at once, `what` being "a step of CartPole-v1".

    Raises UserError if that raises: only a copy that raises by itself is restarted.
    """
    note_activity(what)
    try:
        return call(*arguments)
    except PASSED_ON:
        raise
    except BaseException as error:
        raise_if_signalled()  # A signal to the process group has ended the workers of `async`.
        raise UserError(f"environment.id: {what} raised {described(error)}") from error
    finally:
        note_activity("")


class RestartingEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that recreates an environment by `make` when it raises, and starts a new episode.

    The failed step then returns the new episode's first observation, with the error under `FAULT`. Only PASSED_ON
    propagates, so the other copies in a vector environment complete their steps. It tries up to `restarts` times in a
    row; the reader of `FAILURES` counts them over the run.
    """

    def __init__(self, env: gym.Env[Any, Any], make: Callable[[], gym.Env[Any, Any]], restarts: int, name: str) -> None:
        super().__init__(env)
        self._make = make
        self._restarts = restarts
        self._name = name
        self._seed = 0
        self._is_open = True
        self._has_stepped = False
        self._generator: Any = None
        self._last: Any = None
        self._shape = getattr(self.observation_space, "shape", None)
        """The shape of observations; None if they have parts."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            result = self.env.step(action)
            if not self._has_stepped or self._is_suspect(result):
                check_step(result, self.observation_space, self._name)
            observation, reward, terminated, truncated, info = result
            info = batchable(info)
        except PASSED_ON:
            raise
        except BaseException as error:
            observation, info = self._another(error)
            return observation, 0.0, False, False, info
        self._has_stepped = True
        # The reset that follows an episode's end may write into the same array.
        self._last = deepcopy(observation) if terminated or truncated else observation
        return self._last, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._seed = self._seed if seed is None else seed
        self._generator = generator_state(self.env.unwrapped) if seed is None else None
        try:
            start = self._reset(seed, options)
            check_start(start, self.observation_space, self._name)
            self._last, info = start[0], batchable(start[1])
        except PASSED_ON:
            raise
        except BaseException as error:
            return self._another(error)
        return self._last, info

    def _reset(self, seed: int | None, options: dict[str, Any] | None = None) -> Start:
        """Reset the environment, and with a seed also the global generators of this process."""
        if seed is not None:
            seed_global_generators(seed)
        _renew_world(self.env.unwrapped)
        start: Start = self.env.reset(seed=seed, options=options)
        return start

    def _is_suspect(self, result: Any) -> bool:
        """True if a step needs a check: its observation has the wrong shape, or has parts and ends an episode.

        Other observations are stacked, which fails on a wrong shape, but without naming the environment.
        """
        return bool(result[2] or result[3]) if self._shape is None else np.shape(result[0]) != self._shape

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            close_in_time(self.env.close, self._name)

    @property
    def episode(self) -> tuple[dict[str, Any], Any]:
        """The running episode's origin, JSON-compatible, and the last observation.

        The origin is the seed of the reset, or the random generator state before a reset without a seed. It also holds
        the generator's current state, which a replay must reproduce.
        """
        now = generator_state(self.env.unwrapped)
        return {"seed": self._seed, "generator": self._generator, "now": now}, self._last

    @episode.setter
    def episode(self, again: tuple[Mapping[str, Any], Sequence[Any]]) -> None:
        """Replay an episode from its origin and actions; if that fails, the last observation is None."""
        origin, actions = again
        self._seed, self._generator, self._last = origin["seed"], origin["generator"], None
        try:
            if self._generator is not None:
                set_generator_state(self.env.unwrapped, self._generator)
            last, _ = self._reset(self._seed if self._generator is None else None)
            for action in actions:
                last = self.env.step(action)[0]
            if origin.get("now") in (None, generator_state(self.env.unwrapped)):
                self._last = last
        except PASSED_ON:
            raise
        except BaseException:  # Environments and corrupt files may raise anything.
            return

    def _another(self, error: BaseException) -> Start:
        """Begin a new episode after an `error`, with one new seed after another until nothing is raised."""
        failures, start = 1, None
        while start is None and failures <= self._restarts:
            self._seed = another_seed(self._seed)
            try:
                start = self._begin_anew()
            except PASSED_ON:
                raise
            except BaseException as another:
                error, failures = another, failures + 1
        observation, info = (self._placeholder(), {}) if start is None else start
        return observation, {**info, FAULT: without_place(error), SOURCE_LINES: place(error), FAILURES: failures}

    def _begin_anew(self) -> Start:
        self.close()
        self.env = self._make()
        self._is_open = True
        self._generator = None
        self._last, info = self._reset(self._seed)
        return self._last, batchable(info)

    def _placeholder(self) -> Any:
        """An observation that nothing reads: after this many failures the run ends."""
        space = self.observation_space
        return next(iter(iterate(batch_space(space, 1), create_empty_array(space, 1))))


def _renew_world(env: Any) -> None:
    """Give Gymnasium's BipedalWalker a new Box2D world for its next episode, as LunarLander does itself.

    In a reused world the order in which contacts are solved depends on all earlier episodes, so an episode would not be
    determined by its seed and actions.
    """
    if type(env).__module__ == "gymnasium.envs.box2d.bipedal_walker":
        env._destroy()
        env.world = type(env.world)()
