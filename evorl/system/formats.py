"""Serialisation of agents and tensors as safetensors. Nothing is pickled, and no input is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from evorl.types.agents import ROLES, Agent, Description
from evorl.types.messages import message_of
from evorl.types.outcomes import UserError
from evorl.types.tensors import Roles, Shape, Tensors

DESCRIPTIONS = TypeAdapter(list[Description])
"""Validator of the agent descriptions in a file."""


UNREADABLE = (SafetensorError, ValueError, KeyError, IndexError, TypeError, RuntimeError)
"""Errors raised for malformed files; RuntimeError for unbounded shapes and nesting."""


def encode_agents(agents: Sequence[Agent]) -> bytes:
    """Encode agents as safetensors, with their descriptions in the header; inverse of `decode_agents`."""
    tensors = {
        f"{index}/{module}/{role}/{name}": value.contiguous()
        for index, agent in enumerate(agents)
        for module, roles in agent.tensors.items()
        for role, named in roles.items()
        for name, value in named.items()
    }
    return save(tensors, metadata={"agents": json.dumps([agent.describe() for agent in agents])})


def decode_agents(payload: bytes, where: str) -> list[Agent]:
    """Decode the agents in `payload`; error messages name its origin `where`. Raises UserError."""
    try:
        loaded = load(payload)
        header = payload[8 : 8 + int.from_bytes(payload[:8], "little")]
        descriptions = DESCRIPTIONS.validate_json(json.loads(header)["__metadata__"]["agents"])
        tensors: list[dict[str, Roles]] = [{} for _ in descriptions]
        # Sorted: the library's order varies between runs, and mutations draw noise tensor by tensor.
        for key, value in sorted(loaded.items()):
            index, module, role, name = key.split("/", 3)
            if role not in ROLES or not index.isdecimal():
                raise ValueError(f"tensor {key!r} belongs to no agent")
            tensors[int(index)].setdefault(module, {}).setdefault(role, {})[name] = value
        for roles in (roles for agent in tensors for roles in agent.values()):
            for role in ROLES:
                if role != "target":  # Not every network has a target; the other roles may be empty.
                    roles.setdefault(role, {})
        return [Agent(**vars(each), tensors=own) for each, own in zip(descriptions, tensors, strict=True)]
    except ValidationError as error:
        first = error.errors()[0]
        reason = message_of(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 300)
        raise UserError(f"{where}: not a file of agents: {reason}") from error
    except UNREADABLE as error:
        raise UserError(f"{where}: not a file of agents: {message_of(error, 200)}") from error


def encode_tensors(tensors: Tensors) -> bytes:
    """Encode tensors as safetensors; inverse of `decode_tensors`."""
    return save({name: value.cpu().contiguous() for name, value in tensors.items()})


def decode_tensors(payload: bytes, where: str) -> Tensors:
    """Decode the output of `encode_tensors`; error messages name its origin `where`. Raises UserError."""
    try:
        return load(payload)
    except UNREADABLE as error:
        raise UserError(f"{where}: not a file of tensors: {message_of(error, 200)}") from error


def numbers_to_tensors(**numbers: int) -> Tensors:
    """Whole numbers as tensors [] of a state."""
    return {name: torch.tensor(number) for name, number in numbers.items()}


def with_prefix(prefix: str, state: Tensors) -> Tensors:
    """A state as a part of a larger one: its names after the `prefix`."""
    return {f"{prefix}{name}": value for name, value in state.items()}


def part_of(prefix: str, state: Tensors) -> Tensors:
    """The part of a state whose names begin with the `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def check_tensors(state: Mapping[str, Tensor], expected: Mapping[str, tuple[Shape, torch.dtype]], where: str) -> None:
    """Raise UserError unless `state` has exactly the expected tensors, with the expected shapes and dtypes."""
    for name in sorted(state.keys() ^ expected.keys()):
        raise UserError(f"{where}: tensor {name[:80]!r} is {'not expected here' if name in state else 'missing'}")
    for name, (shape, dtype) in expected.items():
        value = state[name]
        if (tuple(value.shape), value.dtype) != (tuple(shape), dtype):
            raise UserError(
                f"{where}: tensor {name!r} is {value.dtype} {tuple(value.shape)}; it should be {dtype} {tuple(shape)}"
            )


def load_like(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy a state into `tensors`, in place. Raises UserError unless names, shapes and dtypes are the same."""
    check_tensors(state, {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}, where)
    for name, value in tensors.items():
        value.copy_(state[name])
