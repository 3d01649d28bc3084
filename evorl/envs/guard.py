"""Fault-tolerant wrapper for a single environment: it is recreated when it raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from evorl.envs.closing import close_in_time
from evorl.seeding import derive_seed
from evorl.system.plugins import place, without_place
from evorl.types import UserError

FAULT, PLACE, FAILURES, FIRST = "evorl.fault", "evorl.place", "evorl.failures", "evorl.first"
"""Info keys of a step or reset in which an environment raised: the last error, the user's source lines that led to it,
the number of errors, and `reset` or `step` if the first call of that kind raises reproducibly."""


class Guard(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that recreates an environment by `make` when it raises, and starts a new episode.

    The failed step then returns the new episode's first observation, with the error under `FAULT`. Only a UserError
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
        self._seed = 0
        self._is_open = True
        self._has_stepped = False
        self._generator: Any = None
        self._shown: Any = None

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            result = self.env.step(action)
            self._shown = result[0]
        except UserError:
            raise
        except Exception as error:
            first = not self._has_stepped and self._is_raised_again(error, action)
            self._has_stepped = True
            observation, info = self._refused(error, "step") if first else self._another(error)
            return observation, 0.0, False, False, info
        self._has_stepped = True
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed = self._seed if seed is None else seed
        inner = self.env.unwrapped
        self._generator = generator_state(inner) if seed is None else None
        _renew_world(inner)
        try:
            observation, info = self.env.reset(seed=seed, options=options)
        except UserError:
            raise
        except Exception as error:
            first = not self._has_stepped and self._is_raised_again(error)
            return self._refused(error, "reset") if first else self._another(error)
        self._shown = observation
        return observation, info

    def close(self) -> None:
        """Close the environment. An exception or a hang is reported in one line."""
        if self._is_open:
            self._is_open = False
            close_in_time(self.env.close, self._name)

    def _begin_anew(self) -> tuple[Any, dict[str, Any]]:
        """Recreate the environment and return the first observation of a new episode."""
        self.close()
        self.env = self._make()
        self._is_open = True
        self._generator = None
        self._shown, info = self.env.reset(seed=self._seed)
        return self._shown, info

    def _is_raised_again(self, error: Exception, action: Any = None) -> bool:
        """Return whether a new environment raises the same error at the same line, on reset or on this action."""
        try:
            self._begin_anew()
            if action is not None:
                self.env.step(action)
        except UserError:
            raise
        except Exception as another:
            return type(another) is type(error) and place(another) == place(error)
        return False

    @property
    def episode(self) -> tuple[dict[str, Any], Any]:
        """Return the running episode's JSON-compatible origin, and the last observation.

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
        try:
            if self._generator is not None:
                set_generator_state(self.env.unwrapped, self._generator)
            _renew_world(self.env.unwrapped)
            shown, _ = self.env.reset(seed=self._seed if self._generator is None else None)
            for action in actions:
                shown = self.env.step(action)[0]
            if origin.get("now") in (None, generator_state(self.env.unwrapped)):
                self._shown = shown
        except UserError:
            raise
        except Exception:  # Environments and corrupt files may raise anything.
            return

    def _another(self, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Restart the environment and return the first observation of a new episode."""
        failures = 1
        while failures <= self._restarts:
            self._seed = another_seed(self._seed)
            try:
                observation, info = self._begin_anew()
                return observation, {**info, **fault(error, failures)}
            except UserError:
                raise
            except Exception as another:
                error = another
                failures += 1
        # This observation is never trained on: so many failures end the run.
        return self.observation_space.sample(), fault(error, failures)

    def _refused(self, error: Exception, first: str) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {**fault(error, self._restarts + 1), FIRST: first}


def fault(error: Exception, failures: int) -> dict[str, Any]:
    """Return the info entries that describe an error."""
    return {FAULT: without_place(error), PLACE: place(error), FAILURES: failures}


def another_seed(seed: int) -> int:
    """Return a seed for a restarted environment, derived because consecutive seeds belong to the other copies."""
    return derive_seed(seed, generation=0, rank=0, purpose="restart") % 2**31


def generator_state(env: Any) -> dict[str, Any]:
    """Return the JSON-compatible state of an environment's random generator; empty if it uses another generator.

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


def _renew_world(env: Any) -> None:
    """Give Gymnasium's BipedalWalker a new Box2D world for its next episode, as LunarLander does itself.

    In a reused world the order in which contacts are solved depends on all earlier episodes, so an episode would not be
    determined by its seed and actions.
    """
    if type(env).__module__ == "gymnasium.envs.box2d.bipedal_walker":
        env._destroy()
        env.world = type(env.world)()
