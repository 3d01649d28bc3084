"""Single environments that outlive their own exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, SupportsFloat

import gymnasium as gym

from evorl.randomness import derive_seed
from evorl.types import UserError

FAULT, FAILURES = "evorl.fault", "evorl.failures"
"""The keys of a step's or reset's info where an environment raised: the last error, and the number of errors."""


class Guard(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is restarted by `make` when it raises, and begins another episode.

    The step that raised then gives the new episode's first observation, and says so under `FAULT`. Only a UserError
    leaves it, so that the other copies in a vector environment have made whole steps. It tries `restarts` times in a
    row; whoever reads `FAILURES` counts them over the run.
    """

    def __init__(self, env: gym.Env[Any, Any], make: Callable[[], gym.Env[Any, Any]], restarts: int) -> None:
        super().__init__(env)
        self._make = make
        self._restarts = restarts
        self._seed = 0

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            return self.env.step(action)
        except UserError:
            raise
        except Exception as error:
            observation, info = self._another(error)
            return observation, 0.0, False, False, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed = self._seed if seed is None else seed
        try:
            return self.env.reset(seed=seed, options=options)
        except UserError:
            raise
        except Exception as error:
            return self._another(error)

    def _another(self, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Restart an environment and return the first observation of its next episode."""
        failures = 1
        while failures <= self._restarts:
            self._seed = another_seed(self._seed)
            with contextlib.suppress(Exception):
                self.env.close()
            try:
                self.env = self._make()
                observation, info = self.env.reset(seed=self._seed)
                return observation, {**info, FAULT: in_words(error), FAILURES: failures}
            except UserError:
                raise
            except Exception as another:
                error = another
                failures += 1
        # Nothing learns from this observation: whoever reads so many failures ends the run.
        return self.observation_space.sample(), {FAULT: in_words(error), FAILURES: failures}


def another_seed(seed: int) -> int:
    """Return a seed for what is restarted: the next ones in a row belong to the other copies."""
    return derive_seed(seed, generation=0, rank=0, purpose="restart") % 2**31


def in_words(error: Exception) -> str:
    """Return an error on one line."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:300]
