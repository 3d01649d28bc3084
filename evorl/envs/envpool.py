"""EnvPool's implementations of environments that Gymnasium has too, stepped by threads in C++ (arXiv 2206.10558).

Axes: N environment copies.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from evorl.system.extras import require
from evorl.types import UserError

THREADS = "num_threads"


class EnvPool(VectorEnv[Any, Any, Any]):
    """N copies of one environment in EnvPool, with Gymnasium's spaces, so that agents can also act in Gymnasium's.

    EnvPool takes seeds only when it creates environments, so each reset with a seed creates them anew. It reports an
    episode that terminates exactly at the time limit as truncated.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    _pool: Any = None

    def __init__(self, name: str, copies: int, options: Mapping[str, Any]) -> None:
        """Make the copies with EnvPool's `options`.

        Raises UserError if EnvPool is not installed, lacks this environment or one of the options, or has other spaces
        than Gymnasium.
        """
        require("envpool", "environment.vectorization: envpool")
        package: Any = importlib.import_module("envpool")
        if name not in package.list_all_envs():
            raise UserError(f"environment.vectorization: EnvPool has no {name}; use auto")
        self.num_envs = copies
        self.spec = gym.spec(name)
        if (limit := self.spec.max_episode_steps) is not None:
            options = {"max_episode_steps": limit, **options}
        self._make = partial(package.make, name, env_type="gymnasium", num_envs=copies, **options)
        try:
            self._pool = self._make()
        except TypeError as error:
            raise UserError(f"environment.kwargs: EnvPool's {name} does not accept these arguments: {error}") from error
        with gym.make(name, **{key: value for key, value in options.items() if key != THREADS}) as single:
            self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        for what in ("observation", "action"):
            theirs, ours = (getattr(each, f"single_{what}_space") for each in (self._pool, self))
            if not _alike(theirs, ours):
                raise UserError(
                    f"environment.vectorization: EnvPool's {name} has the {what} space {theirs}, Gymnasium's {ours}; "
                    "use auto"
                )
        self.observation_space = batch_space(self.single_observation_space, copies)
        self.action_space = batch_space(self.single_action_space, copies)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all copies: with one seed, copy i begins from `seed` + i; with N seeds, each copy from its own."""
        if seed is not None:
            seeds: Any = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
            self._pool = None  # EnvPool's threads and environments end with the last reference.
            self._pool = self._make(seed=[each % 2**31 for each in seeds])
        first: tuple[Any, dict[str, Any]] = self._pool.reset()
        return first

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result: tuple[Any, Any, Any, Any, dict[str, Any]] = self._pool.step(actions)
        return result

    def close_extras(self, **kwargs: Any) -> None:
        """Drop the last reference to the pool, which ends its threads."""
        self._pool = None


def _alike(theirs: gym.Space[Any], ours: gym.Space[Any]) -> bool:
    """True for spaces of one kind and shape; EnvPool's boxes may have other types, and observations other bounds."""
    if isinstance(ours, Box):
        return isinstance(theirs, Box) and theirs.shape == ours.shape
    return theirs == ours
