"""Environment specs: observation spaces as named parts that networks can encode, actions, and action masks.

Axes: N environment copies, `num_envs` per agent; A actions of all choices concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from evorl.types.outcomes import UserError
from evorl.types.tensors import Flags

WHOLE = "observation"
"""Name of the part if the space has only one."""
LARGEST = math.sqrt(float(np.finfo(np.float32).max))
"""Observations must be smaller in absolute value, 1.8e19: networks and their statistics square them in float32."""
MASK = "action_mask"
"""Key of the mask in the info, and name of the observation part that stores it."""
ACTION = "action"
"""Name of the extra input part of Q-functions of continuous actions."""


@dataclass(frozen=True)
class ObservationSpec:
    """One part of an observation, as it is stored.

    - `vector`: numbers of any shape, flattened;
    - `categories`: integers, each below its entry in `sizes`, one-hot encoded;
    - `image`: rows, columns and channels; channels are the last axis if `channels_last`, else the first.

    Networks read values from `low` to `high` as values from 0 to 1: bytes, and images with the bounds of pixels, which
    are at least 0, above 1 and at most `BRIGHTEST`. If `frames` is above 0, the first axis is a stack of that many
    successive frames, newest last, and zero frames pad the start of an episode.
    """

    kind: Literal["vector", "categories", "image"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    channels_last: bool = False
    frames: int = 0
    low: float = 0.0
    high: float = 1.0

    @property
    def width(self) -> int:
        """The number of network inputs."""
        return sum(self.sizes) if self.kind == "categories" else math.prod(self.shape)

    @property
    def channels(self) -> int:
        """The number of channels of an image."""
        if len(self.shape) == 2:
            return 1
        return self.shape[-1] if self.channels_last else self.shape[0]

    @property
    def image_size(self) -> tuple[int, int]:
        """The rows and columns of an image."""
        rows, columns = self.shape[:2] if self.channels_last or len(self.shape) == 2 else self.shape[1:]
        return rows, columns


ObservationSpecs = Mapping[str, ObservationSpec]


def as_numbers(x: torch.Tensor, part: ObservationSpec) -> torch.Tensor:
    """A vector or image [..., *shape] as floats, scaled from the part's bounds to [0, 1]."""
    values = x.float()
    if part.low:
        values = values - part.low
    return values if part.high - part.low == 1 else values / (part.high - part.low)


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

    @property
    def mask_size(self) -> int:
        """The length A of an action mask; 0 if the environment gives none."""
        return sum(choices(self.action)) if self.masked else 0

    def with_mask(self) -> ObservationSpecs:
        """The parts of an observation as experience holds them: the action mask, if any, is a part of its own."""
        mask = {MASK: ObservationSpec("vector", (self.mask_size,), torch.bool)} if self.masked else {}
        return {**self.parts, **mask}


def observation_specs(space: gym.Space[Any]) -> dict[str, ObservationSpec]:
    """The parts of an observation space by name: `camera`, `arm.angles`, or `observation` if there is only one.

    Raises UserError if a part has no encoder.
    """
    parts: dict[str, ObservationSpec] = {}
    # A space of parts is indexed as its observations are.
    for name, inner, _ in parts_of(space, space):
        if name in parts:
            raise UserError(f"environment.id: two parts of the observation are called {name!r}; rename one")
        kind = known_kind(inner, PARTS)
        if kind is None:
            where = "the observation" if inner is space else f"part {name!r} of the observation"
            supported = ", ".join(sorted(part.__name__ for part in PARTS))
            raise UserError(
                f"environment.id: {where} is {inner}, which no encoder supports; supported are {supported}, Dict, Tuple"
            )
        parts[name] = PARTS[kind](inner)
        if 0 in parts[name].shape:
            raise UserError(f"environment.id: an observation of shape {list(parts[name].shape)} holds no numbers")
    return parts


def parts_of(space: gym.Space[Any], nested: Any, name: str = "") -> Iterator[tuple[str, Any, gym.Space[Any]]]:
    """Yield the name of each part of a space, its value in what is `nested` in the same way, and its own space.

    Raises KeyError with the name of a part that is missing, UserError for a name that no saved space would keep.
    """
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        yield name or WHOLE, nested, space
        return
    for key, inner in space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces):
        if isinstance(space, gym.spaces.Dict) and not isinstance(key, str):
            raise UserError(f"environment.id: {space} has keys that are not strings")
        part = f"{name}.{key}" if name else str(key)
        try:
            value = nested[key]
        except (KeyError, IndexError, TypeError) as error:
            raise KeyError(part) from error
        yield from parts_of(inner, value, part)


def known_kind(space: gym.Space[Any], known: Mapping[type, Any]) -> type | None:
    """The most specific class in `known` of which a space is an instance, or None."""
    return next((kind for kind in type(space).__mro__ if kind in known), None)


def wrong_actions(algorithm: str, interface: EnvSpec, takes: str) -> UserError:
    """The error for an action space that an algorithm does not support; `takes` names the supported ones."""
    space, where = interface.action, interface.environment
    return UserError(f"algorithm.name: {algorithm} cannot act in {space} of {where}; it takes {takes}")


def with_action(
    interface: EnvSpec, algorithm: str, parts: ObservationSpecs, takes: str = "a Box between bounds"
) -> ObservationSpecs:
    """The inputs of a Q-function of continuous actions: these parts of the observation and the flattened action.

    Raises UserError if the action space is not a bounded Box (the message names the `algorithm` and the spaces that it
    `takes`), or if an observation part already has the action's name.
    """
    space, where = interface.action, interface.environment
    if not (isinstance(space, gym.spaces.Box) and space.is_bounded() and 0 not in space.shape):
        raise wrong_actions(algorithm, interface, takes)
    if ACTION in interface.parts:
        raise UserError(f"environment.id: a part of the observation of {where} is called {ACTION!r}; rename it")
    return {**parts, ACTION: ObservationSpec("vector", (math.prod(space.shape),), torch.float32)}


def choices(space: gym.Space[Any]) -> tuple[int, ...]:
    """The number of actions of each choice in a discrete action space; empty for other spaces."""
    if isinstance(space, gym.spaces.Discrete):
        return (int(space.n),)
    return tuple(map(int, space.nvec.flatten())) if isinstance(space, gym.spaces.MultiDiscrete) else ()


def allows_each_choice(mask: Flags, sizes: Sequence[int]) -> Any:
    """True [...] where a mask [..., A] allows at least one action of each choice, of which `sizes` has the widths."""
    return np.logical_or.reduceat(mask, np.cumsum([0, *sizes[:-1]]), axis=-1).all(-1)


BRIGHTEST = 2**16
"""The largest value of a pixel."""


def _box(space: gym.spaces.Box) -> ObservationSpec:
    shape = tuple(space.shape)
    # Images of flags, such as MinAtar's, take a byte for each flag.
    bytes_ = space.dtype == np.uint8 or (space.dtype == np.bool_ and len(shape) == 3)
    dtype = torch.uint8 if bytes_ else torch.float32
    if len(shape) > 3:
        raise UserError(
            f"environment.id: an observation of shape {list(shape)} has no encoder; boxes of up to 3 dimensions do"
        )
    image = len(shape) == 3 or (len(shape) == 2 and bytes_)
    part = ObservationSpec(
        "image" if image else "vector", shape, dtype, channels_last=len(shape) == 3 and _channels_last(shape)
    )
    if not (space.low.size and (image or bytes_)):
        return part
    # One scale for all elements, from the lowest to the highest bound, because pixels share a unit.
    low, high = float(space.low.min()), float(space.high.max())
    if not (bytes_ or (low >= 0 and 1 < high <= BRIGHTEST)):
        return part
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


def float_bounds(space: gym.spaces.Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a Box's bounds as float64, rounded inward: float64 cannot represent 2**63 - 1 and would round it up."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    # As objects, integers and floats are compared exactly.
    below, above = low.astype(object) < space.low.astype(object), high.astype(object) > space.high.astype(object)
    return np.where(below, np.nextafter(low, np.inf), low), np.where(above, np.nextafter(high, -np.inf), high)


def from_zero(values: NDArray[Any], space: Any) -> NDArray[Any]:
    """Convert choices [..., *shape], counted from 0, to a discrete space's own: from its `start`, in its dtype."""
    # Integers wrap around, so the sum is right even where `values` alone do not fit the type.
    return np.asarray(values.astype(space.dtype) + np.asarray(space.start).astype(space.dtype))


def to_zero(values: NDArray[Any], space: Any) -> NDArray[np.int64]:
    """Count choices [..., *shape] of a discrete space from 0; the inverse of `from_zero`."""
    # In a narrow type, the difference may not fit; in uint64, not the number itself.
    return np.asarray(values).astype(np.int64, copy=False) - np.asarray(space.start).astype(np.int64)


def finite_bounds(space: gym.spaces.Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bounds within those of a Box and at most 2,000 apart, from which actions can be drawn uniformly."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    low = np.maximum(low, np.minimum(high, 1e3) - 2e3)
    return low, np.minimum(high, low + 2e3)


WIDE = 1e9
"""Bounds of actions beyond this are more likely those of their type than the environment's own."""


def wide_bounds(space: gym.Space[Any], id: str) -> str:
    """Return a remark on an action space with bounds like those of its type, or an empty string."""
    if not isinstance(space, gym.spaces.Box):
        return ""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    wide = space.bounded_below & space.bounded_above & (np.maximum(np.abs(low), np.abs(high)) > WIDE)
    if not wide.any():
        return ""
    low, high = low[wide][0], high[wide][0]
    return (
        f"the action_space of {id} is bounded by {low:.3g} and {high:.3g}, and actions are scaled to these bounds; "
        "give those between which actions are useful"
    )


def batched(space: gym.Space[Any], observations: Sequence[Any]) -> Any:
    """Observations of a space as one batch [N', ...]."""
    if isinstance(space, gym.spaces.Box):
        return np.stack(observations).astype(space.dtype, copy=False)
    room: Any = create_empty_array(space, len(observations))
    return concatenate(space, observations, room)


def mapped(function: Callable[..., Any], nested: Any, *others: Any) -> Any:
    """Apply a function to the leaves of dictionaries and tuples, and to those of `others` in the same places."""
    if isinstance(nested, Mapping):
        return {name: mapped(function, value, *(other[name] for other in others)) for name, value in nested.items()}
    if isinstance(nested, tuple | list):
        return tuple(mapped(function, *values) for values in zip(nested, *others, strict=True))
    return function(nested, *others)
