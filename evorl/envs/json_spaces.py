"""JSON serialisation of an environment's interface, so that agents can act where it is not installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.spaces import EnvSpec, GivenObservations, ObservationReader
from evorl.types import UserError

MAX_NUMBERS = 2**24
"""Largest number of elements in an observation or action; a larger one was not written by evorl."""
MAX_CHILDREN = 1_000
MAX_BATCH = 2**16
"""Largest batch size for which an error can name the offending observation."""
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, AssertionError, OverflowError, RecursionError)
"""Exceptions that constructing spaces from malformed data may raise."""
Json = dict[str, Any]


def interface_to_json(interface: EnvSpec) -> Json:
    """The JSON description of an interface; the inverse of `interface_from_json`."""
    frames = max((part.frames for part in interface.parts.values()), default=0)
    spaces = {"observation": space_to_json(interface.observation), "action": space_to_json(interface.action)}
    return {"environment": interface.environment, **spaces, "masked": interface.masked, "frames": frames}


def interface_from_json(data: Any, settings: Environment, where: str) -> tuple[EnvSpec, ObservationReader]:
    """The interface that `data` describes, and the reader of its observations.

    Raises UserError, citing `where` the data was found, if it is malformed.
    """
    try:
        observation, action = space_from_json(data["observation"]), space_from_json(data["action"])
        frames, masked = int(data["frames"]), bool(data["masked"])
        reader = ObservationReader(settings, observation, GivenObservations(settings.id, MAX_BATCH, 1), frames)
    except UNREADABLE as error:
        raise UserError(f"{where}: is not a description of an environment: {type(error).__name__}") from error
    return EnvSpec(settings.id, reader.parts, action, masked, observation), reader


def space_to_json(space: gym.Space[Any]) -> Json:
    """The JSON description of a space. Raises UserError for an unsupported kind of space."""
    for kind, (write, _) in KINDS.items():
        if isinstance(space, getattr(gym.spaces, kind)):
            return {"kind": kind, **write(space)}
    raise UserError(f"environment.id: {space} cannot be written as JSON")


def space_from_json(data: Any) -> gym.Space[Any]:
    """The space of a JSON description. Raises one of UNREADABLE."""
    return KINDS[data["kind"]][1](data)


def _box(data: Any) -> gym.Space[Any]:
    shape = _shape(data["shape"])
    dtype = np.dtype(str(data["dtype"])).type
    low, high = (_bounds(data[end], shape) for end in ("low", "high"))
    if np.issubdtype(dtype, np.integer):
        # As a float the largest int64 is one too many.
        most = np.iinfo(dtype).max
        low, high = (
            np.array([min(int(value), most) for value in end.flat], dtype).reshape(shape) for end in (low, high)
        )
    return gym.spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype)


def _shape(values: Any) -> tuple[int, ...]:
    shape = tuple(int(value) for value in values)
    if len(shape) > 8 or min(shape, default=1) < 0 or math.prod(shape) > MAX_NUMBERS:
        raise ValueError("too large a shape")
    return shape


def _bounds(values: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Bounds of this shape, given per element or as one common value."""
    read = np.array([float(value) for value in values])
    return np.full(shape, read[0]) if len(read) == 1 else read.reshape(shape)


def _ends(values: NDArray[Any]) -> list[float | str]:
    """Bounds for JSON, with infinities as strings, and as a single value if all are equal."""
    flat = values.reshape(-1)
    shown_values = flat[:1] if flat.size and (flat == flat[0]).all() else flat
    return [float(value) if np.isfinite(value) else str(value) for value in shown_values]


def _children(space: gym.spaces.Dict | gym.spaces.Tuple[Any]) -> Json:
    if isinstance(space, gym.spaces.Dict):
        return {"spaces": [[name, space_to_json(inner)] for name, inner in space.spaces.items()]}
    return {"spaces": [space_to_json(inner) for inner in space.spaces]}


def _listed(data: Any) -> list[Any]:
    if len(data["spaces"]) > MAX_CHILDREN:
        raise ValueError("too many spaces")
    return list(data["spaces"])


def _multi_discrete(space: gym.spaces.MultiDiscrete[Any]) -> Json:
    numbers = {"nvec": space.nvec.ravel().tolist(), "start": space.start.ravel().tolist()}
    return {"shape": list(space.shape), "dtype": str(space.dtype), **numbers}


def _multi_discrete_from(data: Any) -> gym.Space[Any]:
    shape = _shape(data["shape"])
    kind = _integers(data)
    nvec, start = (np.array(data[name], dtype=kind).reshape(shape) for name in ("nvec", "start"))
    return gym.spaces.MultiDiscrete(nvec, start=start, dtype=kind)


def _integers(data: Any) -> np.dtype[Any]:
    """The dtype of a discrete space. Raises ValueError for another kind."""
    kind = np.dtype(str(data["dtype"]))
    if not np.issubdtype(kind, np.integer):
        raise ValueError("not a dtype of integers")
    return kind


def _multi_binary_from(data: Any) -> gym.Space[Any]:
    shape = _shape(data["shape"])
    # Equality compares `n` in the form in which the space was made: MultiBinary(5) differs from MultiBinary((5,)).
    return gym.spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)


KINDS: Mapping[str, tuple[Callable[[Any], Json], Callable[[Any], gym.Space[Any]]]] = {
    "Box": (
        lambda space: {
            "shape": list(space.shape), "dtype": str(space.dtype), "low": _ends(space.low), "high": _ends(space.high)
        },
        _box,
    ),
    "Discrete": (
        lambda space: {"n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)},
        lambda data: gym.spaces.Discrete(int(data["n"]), start=int(data["start"]), dtype=_integers(data)),
    ),
    "MultiDiscrete": (_multi_discrete, _multi_discrete_from),
    "MultiBinary": (
        lambda space: {"shape": list(space.shape)},
        _multi_binary_from,
    ),
    "Dict": (
        _children,
        lambda data: gym.spaces.Dict({str(name): space_from_json(inner) for name, inner in _listed(data)}),
    ),
    "Tuple": (_children, lambda data: gym.spaces.Tuple([space_from_json(inner) for inner in _listed(data)])),
}  # fmt: skip
"""Serialiser and deserialiser of each kind of space."""
