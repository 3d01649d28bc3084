"""Stacked networks: agents evaluated and trained in one batch, from the network specs of an algorithm.

Axes: P agents of the stack, B batch, D flat values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from evorl.networks import Network
from evorl.networks.base import Layout
from evorl.networks.dense import Tape
from evorl.networks.layers import shares
from evorl.networks.parameters import FlatTensors, Shape, fresh_roles
from evorl.networks.standard import SIGMA, WeightNoise, perturbed
from evorl.system.formats import check_tensors
from evorl.types import Agent, Architecture, Observation, RecurrentInput, Roles, Tensors, UserError


class TargetRule(Protocol):
    """Update rule of a target network."""

    @property
    def changes(self) -> bool:
        """Return whether the rate depends on the number of updates."""

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        """Return the interpolation coefficient tau [P] for this update, given each agent's number of `updates` [P]."""


@dataclass(frozen=True)
class Polyak:
    """Polyak averaging (arXiv 1509.02971, section 3), with the per-agent coefficient `hyperparameter`.

    With `every` above 1, only at every `every`-th update of the agent.
    """

    hyperparameter: str
    every: int = 1

    @property
    def changes(self) -> bool:
        return self.every > 1

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        rate = hyperparameters[self.hyperparameter]
        return rate if self.every == 1 else rate * (torch.remainder(updates, self.every) == 0)


@dataclass(frozen=True)
class Periodic:
    """Periodic hard copy (Mnih et al. 2015), with the per-agent period `hyperparameter`, in updates."""

    hyperparameter: str
    changes: ClassVar[bool] = True

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        period = hyperparameters[self.hyperparameter].round().clamp(min=1)
        return (torch.remainder(updates, period) == 0).float()


@dataclass(frozen=True)
class NetworkSpec:
    """A network of an algorithm, its initial architecture, and the update rule of its target network, if any.

    Raises UserError if the architecture does not fit the network's inputs.
    """

    network: Network
    architecture: Architecture
    target: TargetRule | None = None

    def __post_init__(self) -> None:
        self.network.cost(self.architecture)


@dataclass(frozen=True)
class Shapes:
    """Padded parameter shapes of one network in a stack: trained, untrained, and as matrices for batched products."""

    trained: Mapping[str, Shape]
    untrained: Mapping[str, Shape]
    matrices: Mapping[str, Shape]
    masks: Sequence[str]

    @classmethod
    def of(cls, network: Network, layout: Layout) -> Shapes:
        sizes = layout.architecture.sizes()
        specs = network.specs(layout.architecture)
        shapes = {key: spec.shape(sizes) for key, spec in specs.items()}
        return cls(
            {key: shapes[key] for key, spec in specs.items() if spec.trained},
            {key: shapes[key] for key, spec in specs.items() if not spec.trained},
            {key: spec.matrix(sizes) for key, spec in specs.items()},
            [key for key, spec in specs.items() if spec.mask],
        )

    def numel(self, agents: int) -> int:
        """Return the total number of parameter and buffer values of `agents` agents."""
        return agents * sum(math.prod(shape) for shape in (*self.trained.values(), *self.untrained.values()))


class StackedNetwork:
    """One network of all agents in a stack: trained `parameters`, and untrained `buffers`."""

    def __init__(
        self, network: Network, layout: Layout, shapes: Shapes, parameters: FlatTensors, buffers: FlatTensors
    ) -> None:
        self.network = network
        self.layout = layout
        self.shapes = shapes
        self.parameters = parameters
        self.buffers = buffers
        self.leaves = {key: view.requires_grad_() for key, view in parameters.matrices(shapes.matrices).items()}
        self._tensors = self.leaves | buffers.matrices(shapes.matrices)
        # Outside of learning no parameter gradients are needed, though gradients may flow through to the inputs.
        self._frozen = parameters.matrices(shapes.matrices) | buffers.matrices(shapes.matrices)
        self.tape: Tape | None = None
        """The tape that records calls while a loss with parameter gradients is computed; otherwise None."""
        self.recurrent_shape = network.recurrent_shape(layout.architecture)
        self._noise = WeightNoise(shapes.matrices, parameters.agents)

    @classmethod
    def allocate(cls, network: Network, layout: Layout, shapes: Shapes, agents: int, memory: Tensor) -> StackedNetwork:
        """Return a network whose parameters and buffers are views of `memory` [D]."""
        parameters = FlatTensors(shapes.trained, agents, memory.device, memory)
        rest = memory[parameters.flat.numel() :]
        return cls(network, layout, shapes, parameters, FlatTensors(shapes.untrained, agents, memory.device, rest))

    def target(self) -> StackedNetwork:
        """Return a target network with its own parameters, all zero, and shared buffers."""
        parameters = FlatTensors(self.shapes.trained, self.parameters.agents, self.parameters.flat.device)
        copied = StackedNetwork(self.network, self.layout, self.shapes, parameters, self.buffers)
        copied.use_masks()
        return copied

    def __call__(self, x: Observation, recurrent: RecurrentInput | None = None) -> Tensors:
        """Return the heads' outputs [P, B, outputs] for observations [P, B, ...]."""
        return self.network.forward(self.layout, self._given, x, recurrent, self.tape)[0]

    def forward_recurrent(self, x: Observation, recurrent: RecurrentInput | None) -> tuple[Tensors, Tensor | None]:
        """Return the heads' outputs, and the recurrent state [P, S, K, N] after the observations."""
        return self.network.forward(self.layout, self._given, x, recurrent, self.tape)

    @property
    def _given(self) -> Tensors:
        return self._frozen if self.tape is None else self._tensors

    def forward_pair(self, x: Observation, following: Observation) -> tuple[Tensors, Tensors]:
        """Return the outputs for `x`, and without gradients for `following` of the same shape."""
        return self.network.forward_pair(self.layout, self._given, x, following, self.tape)

    def perturbed(self, generator: torch.Generator) -> StackedNetwork:
        """Return this network with newly sampled noise in its noisy layers, or itself if it has none.

        Call it once per loss.
        """
        if not self._noise.matrices:
            return self
        noise, other = self._noise.draw(generator), copy.copy(self)
        other._frozen = perturbed(self._frozen, self._frozen, noise)
        if self.tape is not None:
            assert not self.tape.scaled, "a gradient knows one noise"
            self.tape.scaled = {SIGMA + name: (name, value) for name, value in noise.items()}
            other._tensors = perturbed(self._tensors, self._frozen, noise)
        return other

    @property
    def tensors(self) -> Tensors:
        """Return all tensors of the forward pass: parameters, buffers and mask shares."""
        return self._frozen

    def computing_with(self, tensors: Tensors) -> StackedNetwork:
        """Return this network with other tensors."""
        other = copy.copy(self)
        other.leaves = {name: tensors[name].detach().requires_grad_() for name in self.leaves}
        other._frozen, other._tensors = tensors, tensors | other.leaves
        return other

    def load(self, roles: Sequence[Roles]) -> None:
        """Copy the agents' parameters and buffers into the stack."""
        self.parameters.load([each["parameters"] for each in roles])
        self.buffers.load([each["buffers"] for each in roles])
        self.use_masks()

    def true_shapes(self, architecture: Architecture) -> dict[str, Shape]:
        """Return the unpadded shapes of one agent's parameters and buffers."""
        sizes = architecture.sizes()
        return {key: spec.shape(sizes) for key, spec in self.network.specs(architecture).items()}

    def use_masks(self) -> None:
        """Replace each mask by its unit shares for layer norm, or drop it if all units count."""
        for key in self.shapes.masks:
            counted = self.buffers.matrices(self.shapes.matrices)[key]
            for tensors in (self._tensors, self._frozen):
                tensors.pop(key, None)
                if not bool((counted == 1).all()):
                    tensors[key] = shares(counted)


@dataclass
class Stack:
    """Agents of compatible architectures: `members` index the population, hyperparameters are tensors [P].

    `targets` are the target networks, present while the agents learn. `noise_units` is the number of exploration noise
    values that persist across steps.
    """

    members: slice | Tensor
    networks: dict[str, StackedNetwork]
    hyperparameters: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, StackedNetwork] = field(default_factory=dict)
    noise_units: int = 0

    @property
    def recurrent_units(self) -> int:
        """Return the number of units in the agents' recurrent state, including noise; 0 if there is none."""
        return max(self.noise_units, *(network.recurrent_shape[1] for network in self.networks.values()))


def new_tensors(networks: Mapping[str, NetworkSpec], agent: Agent, generator: torch.Generator) -> None:
    """Initialise `agent`'s parameters, zero moments, and target networks equal to the parameters where specified."""
    for name, spec in networks.items():
        values = spec.network.initialise(agent.architectures[name], generator)
        roles = fresh_roles(spec.network.specs(agent.architectures[name]), values)
        agent.tensors[name] = {role: tensors for role, tensors in roles.items() if role != "target" or spec.target}
        agent.state.updates[name] = 0.0


def check_network(agent: Agent, name: str, spec: NetworkSpec, where: str) -> None:
    """Raise UserError unless the tensors of one of `agent`'s networks match its architecture."""
    shape, roles = agent.architectures[name], agent.tensors[name]
    if (spec.target is not None) != ("target" in roles):
        raise UserError(f"{where}: {name} has {'no' if spec.target else 'a'} target copy")
    if len(shape.residual_layers) != len(shape.hidden_sizes):
        raise UserError(
            f"{where}: {name} has {len(shape.hidden_sizes)} hidden layers with {len(shape.residual_layers)} depths"
        )
    layers = shape.layers + len(shape.convolutions) + sum(layer.residual_layers for layer in shape.convolutions)
    # Every layer has tensors, so a corrupt description cannot request more layers than its file holds tensors.
    if layers > len(roles["parameters"]):
        raise UserError(f"{where}: {layers} layers of {name} cannot stand in {len(roles['parameters'])} tensors")
    try:
        sizes, specs = shape.sizes(), spec.network.specs(shape)
        shapes = {key: (one.shape(sizes), torch.float32) for key, one in specs.items()}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{where}: the architecture of {name} does not fit together: {error}") from error
    for role, tensors in roles.items():
        expected = {key: shapes[key] for key, one in specs.items() if one.trained == (role != "buffers")}
        check_tensors(tensors, expected, f"{where}: {role} of {name}")
