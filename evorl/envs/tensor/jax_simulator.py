"""Simulators in JAX, which share memory with torch by dlpack. Axes: N copies.

An environment is pure functions of one copy's state, so all copies are one compiled call, and their state is a value
that can be saved: episodes go on bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import torch
import torch.utils.dlpack
from torch import Tensor

from evorl.envs.spaces import mapped
from evorl.envs.stepped import WHERE
from evorl.envs.tensor.simulator import Simulator, Step
from evorl.system.formats import check_tensors
from evorl.types.tensors import Tensors


class Task(ABC):
    """One copy of an environment, as pure functions of its state, a pytree."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    limit: int | None

    @abstractmethod
    def reset(self, key: Any) -> tuple[Any, Any]:
        """The state at the start of an episode and its observation."""

    @abstractmethod
    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        """The state after a step, its observation, the reward, terminated, truncated, and numbers by name."""

    def restart(self, key: Any, state: Any, first: Any) -> tuple[Any, Any]:
        """The state and the observation after a state that ended an episode, which began with `first`."""
        return self.reset(key)

    def first(self, state: Any, observation: Any) -> Any:
        """The part of an episode's first state that `restart` reuses."""
        return ()

    @abstractmethod
    def picture(self, state: Any, observation: Any) -> Any:
        """A picture [rows, columns, 3] of bytes of a state, or None."""


class JaxSimulator(Simulator):
    """N copies of a task, of which each has its own stream of random numbers, and a reset within the step."""

    can_save = True

    def __init__(self, task: Task, copies: int, device: torch.device) -> None:
        self.task, self.copies, self.device = task, copies, device
        self.observation_space, self.action_space, self.limit = task.observation_space, task.action_space, task.limit
        kind = "cpu" if device.type == "cpu" else "gpu"
        self._device = jax.devices(kind)[device.index or 0]
        self._reset = jax.jit(jax.vmap(self._reset_one))
        self._step = jax.jit(jax.vmap(self._step_one))
        self._observation: Any = None

    def _reset_one(self, seed: Any) -> tuple[Any, Any]:
        key, reset_key = jax.random.split(jax.random.PRNGKey(seed))
        state, observation = self.task.reset(reset_key)
        running = {"key": key, "state": state, "first": self.task.first(state, observation)}
        # Python's numbers are weakly typed: the second step would be compiled anew.
        return jax.tree.map(
            lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), running
        ), observation

    def _step_one(self, running: Any, action: Any) -> tuple[Any, tuple[Any, ...]]:
        key, step_key, again = jax.random.split(running["key"], 3)
        state, last, reward, terminated, truncated, info = self.task.step(step_key, running["state"], action)
        over = jnp.logical_or(terminated, truncated)
        state, observation = jax.tree.map(
            lambda new, old: jnp.where(over, new, old).astype(jnp.result_type(old)),
            self.task.restart(again, state, running["first"]),
            (state, last),
        )
        flags = (jnp.asarray(flag, bool) for flag in (terminated, truncated))
        numbers = {name: jnp.asarray(value, jnp.float32) for name, value in info.items() if jnp.ndim(value) == 0}
        return {**running, "key": key, "state": state}, (observation, jnp.float32(reward), *flags, last, numbers)

    def reset(self, seeds: Sequence[int]) -> Any:
        # Placed on the device, as what comes from torch is: otherwise the first step would be compiled twice.
        placed = jax.device_put(jnp.asarray(seeds, jnp.uint32), self._device)
        self.running, self._observation = self._reset(placed)
        return _torch(self._observation)

    def step(self, action: Tensor) -> Step:
        if not action.is_floating_point():
            action = action.to(torch.int32)
        actions = jax.dlpack.from_dlpack(action.contiguous())
        self.running, (self._observation, *rest) = self._step(self.running, actions)
        reward, terminated, truncated, last, info = map(_torch, rest)
        return Step(_torch(self._observation), reward, terminated, truncated, last, info)

    def picture(self) -> Any:
        one = jax.tree.map(lambda leaf: leaf[0], (self.running["state"], self._observation))
        return self.task.picture(*one)

    def state_dict(self) -> Tensors:
        """The leaves of the state in the order of JAX, with unsigned numbers as signed ones of the same bits."""
        leaves = jax.tree.leaves(self.running)
        return {str(index): _signed(_torch(leaf)).clone() for index, leaf in enumerate(leaves)}

    def load_state_dict(self, state: Tensors) -> None:
        leaves, structure = jax.tree.flatten(self.running)
        here = [_torch(leaf) for leaf in leaves]
        expected = {str(index): (tuple(leaf.shape), _signed(leaf).dtype) for index, leaf in enumerate(here)}
        check_tensors(state, expected, WHERE)
        loaded = (state[str(index)].to(self.device).view(leaf.dtype).clone() for index, leaf in enumerate(here))
        self.running = jax.tree.unflatten(structure, [jax.dlpack.from_dlpack(leaf) for leaf in loaded])

    def close(self) -> None:
        """Do nothing: JAX keeps nothing open."""


SIGNED = {torch.uint32: torch.int32, torch.uint16: torch.int16, torch.uint64: torch.int64}


def _signed(tensor: Tensor) -> Tensor:
    return tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))


def _torch(arrays: Any) -> Any:
    """Nested arrays as tensors in the same memory."""
    return mapped(torch.utils.dlpack.from_dlpack, arrays)


def as_gymnasium(space: Any) -> gym.Space[Any]:
    """A space of gymnax as one of Gymnasium. Raises TypeError for another kind."""
    kind = type(space).__name__
    if kind == "Discrete":
        return gym.spaces.Discrete(int(space.n))
    if kind == "Box":
        shape, dtype = tuple(space.shape), jnp.dtype(space.dtype)
        if dtype.kind == "b":
            return gym.spaces.Box(0, 1, shape, bool)
        low, high = (jnp.broadcast_to(jnp.asarray(end, dtype), shape) for end in (space.low, space.high))
        return gym.spaces.Box(jax.device_get(low), jax.device_get(high), shape, dtype.type)
    if kind == "Dict":
        return gym.spaces.Dict({name: as_gymnasium(inner) for name, inner in space.spaces.items()})
    raise TypeError(f"no encoder reads {space}")
