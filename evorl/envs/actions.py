"""Conversion of policy actions to environment actions. Axes: N environment copies, `num_envs` per agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.envs.spec import choices

ActionReader = Callable[[NDArray[Any]], NDArray[Any]]
"""Map policy actions [N, ...] to a new array of actions [N, ...] inside the action space."""


def action_reader(space: gym.Space[Any], num_envs: int) -> ActionReader:
    """Return the conversion function for an action space; algorithms reject spaces other than Box and discrete ones."""
    if isinstance(space, gym.spaces.Box):
        return _box_reader(space)
    return _choice_reader(space, num_envs) if choices(space) else np.array


def _box_reader(space: gym.spaces.Box) -> ActionReader:
    whole = np.issubdtype(space.dtype, np.integer)

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # A diverged agent is stopped at its next update; until then NaN actions must not crash its environment.
        values = np.where(np.isnan(values), 0.0, values)
        # A float32 action may exceed a float64 bound by a rounding error.
        rounded = np.rint(values) if whole else values
        return np.asarray(np.clip(rounded.astype(space.dtype), space.low, space.high))

    return read


def _choice_reader(space: Any, num_envs: int) -> ActionReader:
    """Return the converter for Discrete and MultiDiscrete; it raises ValueError for an out-of-range action."""
    sizes, start = np.array(choices(space)).reshape(space.shape), space.start

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # Atari environments hang on an out-of-range action.
        outside = (values < 0) | (values >= sizes)
        if np.count_nonzero(outside):
            wrong = int(outside.nonzero()[0][0])
            raise ValueError(
                f"agent {wrong // num_envs} chose action {values[wrong]} in environment "
                f"{wrong % num_envs}; the space has actions 0 to {(sizes - 1).tolist()}"
            )
        return np.asarray(values + start)

    return read
