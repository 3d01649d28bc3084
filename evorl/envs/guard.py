"""Single environments that outlive their own exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

import gymnasium as gym

from evorl.envs.closing import close_in_time
from evorl.randomness import derive_seed
from evorl.system.user_code import place, without_place
from evorl.types import UserError

FAULT, PLACE, FAILURES, FIRST = "evorl.fault", "evorl.place", "evorl.failures", "evorl.first"
"""The keys of a step's or reset's info where an environment raised: the last error, the user's lines that led to it,
the number of errors, and `reset` or `step` where the first one of an environment raises whenever it is tried."""


class Guard(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is restarted by `make` when it raises, and begins another episode.

    The step that raised then gives the new episode's first observation, and says so under `FAULT`. Only a UserError
    leaves it, so that the other copies in a vector environment have made whole steps. It tries `restarts` times in a
    row; whoever reads `FAILURES` counts them over the run.

    An error in the first reset or step is tried once more, in a new environment with the same seed and action. Where
    the same line raises the same error again, it is a bug that no restart mends, and `FIRST` says so.
    """

    def __init__(self, env: gym.Env[Any, Any], make: Callable[[], gym.Env[Any, Any]], restarts: int, name: str) -> None:
        super().__init__(env)
        self._make = make
        self._restarts = restarts
        self._name = name
        self._seed = 0
        self._is_open = True
        self._has_stepped = False

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            result = self.env.step(action)
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
        try:
            return self.env.reset(seed=seed, options=options)
        except UserError:
            raise
        except Exception as error:
            first = not self._has_stepped and self._is_raised_again(error)
            return self._refused(error, "reset") if first else self._another(error)

    def close(self) -> None:
        """Close the environment. One that raises or hangs meanwhile is reported in one line."""
        if self._is_open:
            self._is_open = False
            close_in_time(self.env.close, self._name)

    def _begin_anew(self) -> tuple[Any, dict[str, Any]]:
        """Make another environment and return the first observation of its next episode."""
        self.close()
        self.env = self._make()
        self._is_open = True
        return self.env.reset(seed=self._seed)

    def _is_raised_again(self, error: Exception, action: Any = None) -> bool:
        """Return whether a new environment raises the same error at the same line, in its reset or by this action."""
        try:
            self._begin_anew()
            if action is not None:
                self.env.step(action)
        except UserError:
            raise
        except Exception as another:
            return type(another) is type(error) and place(another) == place(error)
        return False

    def _another(self, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Restart an environment and return the first observation of its next episode."""
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
        # Nothing learns from this observation: whoever reads so many failures ends the run.
        return self.observation_space.sample(), fault(error, failures)

    def _refused(self, error: Exception, first: str) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {**fault(error, self._restarts + 1), FIRST: first}


def fault(error: Exception, failures: int) -> dict[str, Any]:
    """Return what an info says of an error."""
    return {FAULT: without_place(error), PLACE: place(error), FAILURES: failures}


def another_seed(seed: int) -> int:
    """Return a seed for what is restarted: the next ones in a row belong to the other copies."""
    return derive_seed(seed, generation=0, rank=0, purpose="restart") % 2**31
