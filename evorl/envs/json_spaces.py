"""JSON serialisation of an environment's interface, so that agents can act where it is not installed."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.reading import ObservationReader
from evorl.envs.spaces import EnvSpec
from evorl.types.outcomes import UserError

MAX_NUMBERS = 2**24
"""Largest number of elements in an observation or action; a larger one was not written by evorl."""
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
        reader = ObservationReader(settings, observation, "observation: number {} of the batch has".format, frames)
    except UNREADABLE as error:
        raise UserError(f"{where}: is not a description of an environment: {type(error).__name__}") from error
    return EnvSpec(settings.id, reader.parts, action, masked, observation), reader


def space_to_json(space: gym.Space[Any]) -> Json:
    """The JSON description of a space. Raises UserError for an unsupported type of space."""
    match space:
        case gym.spaces.Dict():
            return {"kind": "Dict", "spaces": [[name, space_to_json(inner)] for name, inner in space.spaces.items()]}
        case gym.spaces.Tuple():
            return {"kind": "Tuple", "spaces": [space_to_json(inner) for inner in space.spaces]}
        case gym.spaces.MultiBinary():
            return {"kind": "MultiBinary", "shape": list(space.shape)}
        case gym.spaces.Discrete():
            return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
        case gym.spaces.MultiDiscrete():
            ends = {"nvec": space.nvec.ravel().tolist(), "start": space.start.ravel().tolist()}
            return {"kind": "MultiDiscrete", "shape": list(space.shape), "dtype": str(space.dtype), **ends}
        case gym.spaces.Box():
            ends = {"low": _bounds_to_json(space.low), "high": _bounds_to_json(space.high)}
            return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **ends}
    raise UserError(f"environment.id: {space} cannot be written as JSON")


def space_from_json(data: Any) -> gym.Space[Any]:
    """The space of a JSON description. Raises one of UNREADABLE."""
    kind = data["kind"]
    if kind in ("Dict", "Tuple"):
        if kind == "Dict":
            # Gymnasium sorts the names of a plain dictionary.
            return gym.spaces.Dict(OrderedDict((str(name), space_from_json(inner)) for name, inner in data["spaces"]))
        return gym.spaces.Tuple([space_from_json(inner) for inner in data["spaces"]])
    shape = tuple(int(size) for size in data.get("shape", ()))
    if math.prod(shape) > MAX_NUMBERS:
        raise ValueError("too large a shape")
    if kind == "MultiBinary":
        # Equality compares `n` in the form in which the space was made: MultiBinary(5) differs from MultiBinary((5,)).
        return gym.spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    dtype = np.dtype(str(data["dtype"]))
    if kind == "Box":
        low, high = (_bounds_from_json(data[end], shape, dtype) for end in ("low", "high"))
        return gym.spaces.Box(low, high, shape, dtype.type)
    if not np.issubdtype(dtype, np.integer):
        raise ValueError("not a dtype of integers")
    if kind == "Discrete":
        return gym.spaces.Discrete(int(data["n"]), start=int(data["start"]), dtype=dtype)
    if kind == "MultiDiscrete":
        nvec, start = (np.array(data[name], dtype=dtype).reshape(shape) for name in ("nvec", "start"))
        return gym.spaces.MultiDiscrete(nvec, start=start, dtype=dtype)
    raise ValueError("another type of space")


def _bounds_to_json(values: NDArray[Any]) -> list[float | str]:
    """Bounds with infinities as strings, and as a single value if all are equal."""
    flat = values.reshape(-1)
    shortest = flat[:1] if flat.size and (flat == flat[0]).all() else flat
    return [float(value) if np.isfinite(value) else str(value) for value in shortest]


def _bounds_from_json(values: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Bounds of this shape, given per element or as one common value."""
    bounds = [float(value) for value in values]
    if np.issubdtype(dtype, np.integer):
        # As a float the largest int64 is one too many.
        bounds = [min(int(value), np.iinfo(dtype).max) for value in bounds]
    array = np.array(bounds, dtype)
    return np.full(shape, array[0]) if len(array) == 1 else array.reshape(shape)
