"""Environment specs: observation spaces as named parts that networks can encode. Axes: N environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from evorl.types import UserError

WHOLE = "observation"
"""Name of the part if the space has only one."""
ACTION = "action"
"""Name of the extra input part of Q-functions of continuous actions."""


@dataclass(frozen=True)
class ObservationSpec:
    """One part of an observation, as it is stored.

    - `vector`: numbers of any shape, flattened;
    - `categories`: integers, each below its entry in `sizes`, one-hot encoded;
    - `image`: rows, columns and channels; channels are the last axis if `channels_last`, else the first.

    uint8 values from `low` to `high` are scaled to [0, 1]. If `frames` is above 0, the first axis is a stack of that
    many successive frames, newest last, and zero frames pad the start of an episode.
    """

    kind: Literal["vector", "categories", "image"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    channels_last: bool = False
    frames: int = 0
    low: int = 0
    high: int = 255

    @property
    def width(self) -> int:
        """Return the number of network inputs."""
        return sum(self.sizes) if self.kind == "categories" else math.prod(self.shape)

    @property
    def channels(self) -> int:
        """Return the number of channels of an image."""
        if len(self.shape) == 2:
            return 1
        return self.shape[-1] if self.channels_last else self.shape[0]

    @property
    def image_size(self) -> tuple[int, int]:
        """Return the rows and columns of an image."""
        rows, columns = self.shape[:2] if self.channels_last or len(self.shape) == 2 else self.shape[1:]
        return rows, columns


ObservationSpecs = Mapping[str, ObservationSpec]


def as_numbers(x: torch.Tensor, part: ObservationSpec) -> torch.Tensor:
    """Return a vector or image [..., *shape] as floats, with uint8 values scaled from the part's bounds to [0, 1]."""
    if x.dtype != torch.uint8:
        return x.float()
    values = x.float()
    if part.low:
        values.sub_(part.low)
    return values.div_(part.high - part.low)


@dataclass(frozen=True)
class EnvSpec:
    """Interface of an environment: observation parts, action space, and whether it provides action masks.

    `observation` is the space from which the parts were derived.
    """

    environment: str
    parts: ObservationSpecs
    action: gym.Space[Any]
    masked: bool = False
    observation: gym.Space[Any] = field(default_factory=gym.spaces.Dict)


def observation_specs(space: gym.Space[Any], key: str = "environment.id", name: str = "") -> dict[str, ObservationSpec]:
    """Return the parts of an observation space by name: `camera`, `arm.angles`, or `observation` if there is only one.

    Raises UserError, citing the setting `key`, if a part has no encoder.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts: dict[str, ObservationSpec] = {}
        for child, inner in _children(space):
            found = observation_specs(inner, key, f"{name}.{child}" if name else child)
            if twice := parts.keys() & found.keys():
                raise UserError(f"{key}: two parts of the observation are called {min(twice)!r}; rename one")
            parts |= found
        return parts
    reader = PARTS.get(type(space))
    if reader is None:
        where = f"part {name!r} of the observation" if name else "the observation"
        known = ", ".join(sorted(kind.__name__ for kind in PARTS))
        raise UserError(f"{key}: {where} is {space}, which no encoder reads; those there are read {known}, Dict, Tuple")
    return {name or WHOLE: reader(space)}


def split(space: gym.Space[Any], batched: Any, name: str = "") -> dict[str, NDArray[Any]]:
    """Split batched observations [N, ...] of a space into its parts, each [N, ...] as stored."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts: dict[str, NDArray[Any]] = {}
        for child, inner in _children(space):
            value = batched[child] if isinstance(space, gym.spaces.Dict) else batched[int(child)]
            parts |= split(inner, value, f"{name}.{child}" if name else child)
        return parts
    array = np.asarray(batched)
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        array = array - space.start
    return {name or WHOLE: array}


def wrong_actions(algorithm: str, interface: EnvSpec, takes: str) -> UserError:
    """Return the error for an action space that an algorithm does not support; `takes` names the supported ones."""
    space, where = interface.action, interface.environment
    return UserError(f"algorithm.name: {algorithm} cannot act in {space} of {where}; it takes {takes}")


def with_action(interface: EnvSpec, algorithm: str, takes: str = "a Box between bounds") -> ObservationSpecs:
    """Return the inputs of a Q-function of continuous actions: the observation parts and the flattened action.

    Raises UserError if the action space is not a bounded Box (the message names the `algorithm` and the spaces that it
    `takes`), or if an observation part already has the action's name.
    """
    space, where = interface.action, interface.environment
    if not (isinstance(space, gym.spaces.Box) and space.is_bounded() and 0 not in space.shape):
        raise wrong_actions(algorithm, interface, takes)
    if ACTION in interface.parts:
        raise UserError(f"environment.id: a part of the observation of {where} is called {ACTION!r}; rename it")
    return {**interface.parts, ACTION: ObservationSpec("vector", (math.prod(space.shape),), torch.float32)}


def choices(space: gym.Space[Any]) -> tuple[int, ...]:
    """Return the number of actions of each choice in a discrete action space; empty for other spaces."""
    if isinstance(space, gym.spaces.Discrete):
        return (int(space.n),)
    return tuple(map(int, space.nvec.flatten())) if isinstance(space, gym.spaces.MultiDiscrete) else ()


def _children(space: gym.spaces.Dict | gym.spaces.Tuple[Any]) -> list[tuple[str, gym.Space[Any]]]:
    if isinstance(space, gym.spaces.Dict):
        return [(str(name), inner) for name, inner in space.spaces.items()]
    return [(str(index), inner) for index, inner in enumerate(space.spaces)]


def _box(space: gym.spaces.Box) -> ObservationSpec:
    bytes_ = space.dtype == np.uint8
    dtype = torch.uint8 if bytes_ else torch.float32
    shape = tuple(space.shape)
    if len(shape) > 3:
        raise UserError(
            f"environment.id: an observation of shape {list(shape)} has no encoder; boxes of up to 3 dimensions do"
        )
    if 0 in shape:
        raise UserError(f"environment.id: an observation of shape {list(shape)} holds no numbers")
    image = len(shape) == 3 or (len(shape) == 2 and bytes_)
    part = ObservationSpec(
        "image" if image else "vector", shape, dtype, channels_last=len(shape) == 3 and _channels_last(shape)
    )
    if not (bytes_ and space.low.size):
        return part
    # One scale for all elements, from the lowest to the highest bound, because pixels share a unit.
    low, high = int(space.low.min()), int(space.high.max())
    return replace(part, low=low, high=max(high, low + 1))


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Guess whether the last axis of an image holds its channels.

    If exactly one pair of neighbouring axes has equal length, these are rows and columns. Otherwise channels come first
    if that axis is the shortest, else last, which is Gymnasium's convention.
    """
    first, second, third = shape
    if (first == second) != (second == third):
        return first == second
    return first >= min(second, third)


PARTS: Mapping[type, Callable[[Any], ObservationSpec]] = {
    gym.spaces.Box: _box,
    gym.spaces.Discrete: lambda space: ObservationSpec("categories", (), torch.int64, sizes=(int(space.n),)),
    gym.spaces.MultiDiscrete: lambda space: ObservationSpec(
        "categories", tuple(space.shape), torch.int64, sizes=tuple(int(n) for n in space.nvec.flatten())
    ),
    gym.spaces.MultiBinary: lambda space: ObservationSpec("vector", tuple(space.shape), torch.float32),
}
"""Function that derives the ObservationSpec from each kind of space."""
