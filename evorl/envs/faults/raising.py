"""Environments that raise: the run ends by an error that names the environment and quotes its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from evorl.envs.continuation import generator_state, set_generator_state
from evorl.envs.faults.checks import batchable, check_start, check_step
from evorl.envs.faults.closing import close_in_time
from evorl.envs.reading import name_of_copy
from evorl.seeding import seed_global_generators
from evorl.system.plugins import described
from evorl.system.signals import note_activity, raise_if_signalled
from evorl.types.outcomes import EnvironmentRaised, UserError

Start = tuple[Any, dict[str, Any]]
"""The first observation of an episode, or of N of them, and the info of the reset."""
PASSED_ON = (UserError, KeyboardInterrupt, SystemExit)
"""Exceptions of an environment that end the run as they are. Any other is named as the environment's, also one that is
no Exception, as of a panic in Rust."""


def call_or_user_error(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call something of all copies at once, `what` being "a step of CartPole-v1".

    Raises EnvironmentRaised if that raises, with the message of the copy that raised where that is known.
    """
    note_activity(what)
    try:
        return call(*arguments)
    except PASSED_ON:
        raise
    except BaseException as error:
        raise_if_signalled()  # A signal to the process group has ended the workers of `async`.
        raise EnvironmentRaised(f"environment.id: {what} raised {described(error)}") from error
    finally:
        note_activity("")


class GuardedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper of one copy that checks what it returns, names it in errors, and saves and replays its running episode.

    What the environment raises becomes an EnvironmentRaised here, where its traceback is known: worker processes send
    only the message.
    """

    def __init__(self, env: gym.Env[Any, Any], id: str, copy: int = 0, num_envs: int = 1) -> None:
        """`copy` is the number of this one among those of all agents, which have `num_envs` each."""
        super().__init__(env)
        self._id, self._copy, self._num_envs = id, copy, num_envs
        self._steps = 0
        """The step that the running episode is at."""
        self._seed = 0
        self._is_open = True
        self._has_stepped = False
        self._generator: Any = None
        self._last: Any = None
        self._shape = getattr(self.observation_space, "shape", None)
        """The shape of observations; None if they have parts."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        self._steps += 1
        try:
            result = self.env.step(action)
            if not self._has_stepped or self._is_suspect(result):
                check_step(result, self.observation_space, self._id)
            observation, reward, terminated, truncated, info = result
            info = batchable(info)
        except PASSED_ON:
            raise
        except BaseException as error:
            raise self._named(error) from error
        self._has_stepped = True
        # The reset that follows an episode's end may write into the same array.
        self._last = deepcopy(observation) if terminated or truncated else observation
        return self._last, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._steps = 0
        self._seed = self._seed if seed is None else seed
        self._generator = generator_state(self.env.unwrapped) if seed is None else None
        try:
            start = self._reset(seed, options)
            check_start(start, self.observation_space, self._id)
            self._last, info = start[0], batchable(start[1])
        except PASSED_ON:
            raise
        except BaseException as error:
            raise self._named(error) from error
        return self._last, info

    def _named(self, error: BaseException) -> EnvironmentRaised:
        name = name_of_copy(self._id, self._copy, self._num_envs, self._steps)
        return EnvironmentRaised(f"environment.id: {name} raised {described(error)}")

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
            close_in_time(self.env.close, self._id)

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
        self._steps = len(actions)
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


def _renew_world(env: Any) -> None:
    """Give Gymnasium's BipedalWalker a new Box2D world for its next episode, as LunarLander does itself.

    In a reused world the order in which contacts are solved depends on all earlier episodes, so an episode would not be
    determined by its seed and actions.
    """
    if type(env).__module__ == "gymnasium.envs.box2d.bipedal_walker":
        env._destroy()
        env.world = type(env.world)()
