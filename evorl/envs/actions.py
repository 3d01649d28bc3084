"""Actions as environments take them, from those that policies choose. Axes: N copies, `num_envs` for each agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.envs.spec import choices

ActionReader = Callable[[NDArray[Any]], NDArray[Any]]
"""From chosen actions [N, ...] to a new array of actions [N, ...] that the space holds."""


def action_reader(space: gym.Space[Any], num_envs: int) -> ActionReader:
    """Return the reader of the actions of a space; algorithms refuse spaces that are neither boxes nor choices."""
    if isinstance(space, gym.spaces.Box):
        return _box_reader(space)
    return _choice_reader(space, num_envs) if choices(space) else np.array


def _box_reader(space: gym.spaces.Box) -> ActionReader:
    whole = np.issubdtype(space.dtype, np.integer)

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # An agent whose numbers are lost is stopped when it learns; until then its environment shall not break.
        values = np.where(np.isnan(values), 0.0, values)
        # Single precision may lie a hair beyond bounds in double precision.
        rounded = np.rint(values) if whole else values
        return np.asarray(np.clip(rounded.astype(space.dtype), space.low, space.high))

    return read


def _choice_reader(space: Any, num_envs: int) -> ActionReader:
    """Return the reader of a Discrete or MultiDiscrete space, which raises ValueError for an action outside it."""
    sizes, start = np.array(choices(space)).reshape(space.shape), space.start

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # An Atari environment that is given an action outside its space hangs for ever.
        outside = (values < 0) | (values >= sizes)
        if np.count_nonzero(outside):
            wrong = int(outside.nonzero()[0][0])
            raise ValueError(
                f"agent {wrong // num_envs} chose action {values[wrong]} in environment "
                f"{wrong % num_envs}; the space has actions 0 to {(sizes - 1).tolist()}"
            )
        return np.asarray(values + start)

    return read
