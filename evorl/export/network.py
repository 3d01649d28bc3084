"""A single agent as a torch module that maps raw observations to actions in the environment's format.

Axes: B batch of observations, K values for each of N units of the recurrent state. The stack axis is internal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evorl.algorithms import Algorithm
from evorl.algorithms.base import ActInput
from evorl.envs.reading import TYPES
from evorl.envs.spaces import MASK, WHOLE, ObservationSpecs, float_bounds, parts_of
from evorl.networks.stack import Layout, Shapes, Stack, StackedNetwork
from evorl.types.agents import Agent
from evorl.types.batches import RecurrentInput

STATE, NEXT_STATE, ACTION = "state", "next_state", "action"
"""Names of an exported agent's recurrent state, before and after a step, and of its action."""
RESERVED = (ACTION, MASK, STATE, NEXT_STATE)
"""Names of an exported network's inputs and outputs that no part of the observation may have."""


class ActingAgent(nn.Module):
    """An agent that acts deterministically, with its networks unpadded.

    Inputs are the parts of an observation [B, ...], the action mask [B, A] if actions can be masked, and for recurrent
    agents the state [B, K, N], zero at the start of an episode. Outputs are the actions [B, ...], in float64 or int64
    whatever the dtype of their space, and for recurrent agents the next state.
    """

    def __init__(
        self, agent: Agent, algorithm: Algorithm, space: gym.Space[Any], indices: Sequence[int] | None = None
    ) -> None:
        """`space` is the observation space the agent was trained on; `indices` select the entries it observes."""
        super().__init__()
        self.algorithm = algorithm
        self.stack = unpadded(agent, algorithm)
        interface = algorithm.interface
        self.parts: ObservationSpecs = algorithm.policy_parts
        self._unread = {name: part for name, part in interface.parts.items() if name not in self.parts}
        self.masked = interface.mask_size
        shapes = [network.recurrent_shape for network in self.stack.networks.values()]
        self.state_shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        self._space = space
        firsts = {
            name: np.asarray(getattr(inner, "start", 0), dtype=np.int64) for name, inner, _ in parts_of(space, space)
        }
        self._firsts = {name: torch.from_numpy(first) for name, first in firsts.items() if first.any()}
        """The first category of each part that does not begin at 0."""
        self._indices = None if indices is None else torch.tensor(list(indices))
        self._action = interface.action

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs of `forward`, in order."""
        return (
            *map(input_name, self.parts),
            *([MASK] if self.masked else []),
            *([STATE] if self.state_shape[0] else []),
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of `forward`, in order."""
        return (ACTION, NEXT_STATE) if self.state_shape[0] else (ACTION,)

    def forward_inputs(
        self, observation: Any, mask: NDArray[np.bool_] | None, state: NDArray[np.float32] | None
    ) -> list[Tensor]:
        """Convert a batch of raw observations, the action mask and the recurrent state to inputs of `forward`."""
        raw = {name: value for name, value, _ in parts_of(self._space, observation)}
        tensors = [
            torch.from_numpy(np.asarray(raw[name], dtype=TYPES[part.dtype])) for name, part in self.parts.items()
        ]
        if self.masked:
            assert mask is not None, "every observation has a mask"
            tensors.append(torch.from_numpy(mask))
        if self.state_shape[0]:
            batch = len(tensors[0])
            tensors.append(torch.zeros(batch, *self.state_shape) if state is None else torch.from_numpy(state))
        return tensors

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(zip(self.inputs, inputs, strict=True))
        observation = {name: self._read(name, tensors[input_name(name)]).unsqueeze(0) for name in self.parts}
        for name, part in self._unread.items():  # Only critics read these.
            observation[name] = torch.zeros(1, inputs[0].shape[0], *part.shape, dtype=part.dtype)
        if self.masked:
            observation[MASK] = tensors[MASK].unsqueeze(0)
        recurrent = None
        if self.state_shape[0]:
            state = tensors[STATE].unsqueeze(0)
            recurrent = RecurrentInput(state, torch.zeros_like(state[:, :, 0, 0], dtype=torch.bool).unsqueeze(1))
        seen = ActInput(observation, recurrent, torch.Generator(), deterministic=True)
        output = self.algorithm.act(self.stack, seen)
        acted, after = self._to_environment(output.action.squeeze(0)), output.recurrent_state
        return (acted, after.squeeze(0)) if after is not None and self.state_shape[0] else (acted,)

    def _read(self, name: str, x: Tensor) -> Tensor:
        x = x - self._firsts[name] if name in self._firsts else x
        return x if self._indices is None else x.index_select(-1, self._indices)

    def _to_environment(self, action: Tensor) -> Tensor:
        space = self._action
        if isinstance(space, gym.spaces.Box):
            low, high = map(torch.from_numpy, float_bounds(space))
            action = action.double() if space.dtype.kind == "f" else action.double().round()
            return torch.minimum(torch.maximum(action, low), high)
        return action + torch.from_numpy(np.asarray(space.start).astype(np.int64))  # type: ignore[attr-defined]


def unpadded(agent: Agent, algorithm: Algorithm) -> Stack:
    """Return a stack of one agent, with its networks allocated at their own sizes."""
    networks = {}
    for name, spec in algorithm.networks.items():
        layout = Layout(agent.architectures[name], agents=1)
        shapes = Shapes.of(spec.network, layout)
        memory = torch.zeros(shapes.numel(1))
        network = StackedNetwork.allocate(spec.network, layout, shapes, memory)
        network.load([agent.tensors[name]])
        # Compute norms from the shares of units: ONNX export does not support the fused kernel.
        networks[name] = network.computing_with(network.with_all_shares())
    hyperparameters = {name: torch.tensor([value]) for name, value in agent.hyperparameters.items()}
    state = {name: torch.tensor([agent.state.acting[name]]) for name in algorithm.initial_state()}
    return Stack(slice(0, 1), networks, hyperparameters, state)


def input_name(part: str) -> str:
    """Return a part's name as an ONNX input, with a prefix if it is `RESERVED` or begins with a digit (tuples)."""
    return f"{WHOLE}.{part}" if part[:1].isdigit() or part in RESERVED else part
