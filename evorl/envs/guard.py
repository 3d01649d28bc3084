"""Single environments that outlive their own exceptions."""

from __future__ import annotations

import contextlib
from typing import Any, SupportsFloat

import gymnasium as gym

FAULT, LOST = "fault", "lost"
"""What the information of a step or reset says where the environment raised: how, and whether once too often."""


class Guard(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is made again, at most `restarts` times, when it raises, and begins another episode.

    The step that raised then gives the new episode's first observation, and says so under `fault`. It never raises
    itself, so that the other copies in a vector environment have made whole steps.
    """

    def __init__(self, env: gym.Env[Any, Any], restarts: int) -> None:
        super().__init__(env)
        self._made_as = env.spec
        self._restarts = restarts
        self._seed = 0

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            return self.env.step(action)
        except Exception as error:
            observation, info = self._another(error)
            return observation, 0.0, False, False, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._seed = seed
        try:
            return self.env.reset(seed=seed, options=options)
        except Exception as error:
            return self._another(error)

    def _another(self, error: Exception) -> tuple[Any, dict[str, Any]]:
        """The first observation of an episode in an environment made anew."""
        while self._restarts > 0:
            self._restarts -= 1
            self._seed = (self._seed + 1) % 2**31
            with contextlib.suppress(Exception):
                self.env.close()
            try:
                assert self._made_as is not None
                self.env = gym.make(self._made_as)
                observation, info = self.env.reset(seed=self._seed)
                return observation, {**info, FAULT: _words(error), LOST: False}
            except Exception as another:
                error = another
        # Nothing reads this observation: whoever sees that the environment is lost ends the run.
        return self.observation_space.sample(), {FAULT: _words(error), LOST: True}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
