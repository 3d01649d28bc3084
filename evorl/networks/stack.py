"""Networks of agents that compute as one: the network interface, the choice of stacks, and stacked networks.

Axes: P agents of the stack, B batch (S sequences), D flat values, K numbers for each of N recurrent units.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, groupby
from typing import Any

import torch
from torch import Tensor

from evorl.kernels.library import Kernel
from evorl.networks.dense import shares
from evorl.networks.flat import FlatTensors, Weights
from evorl.networks.parameters import Specs, fresh_roles, initialise
from evorl.system.formats import check_tensors
from evorl.types.agents import Agent, Architecture, Convolution
from evorl.types.batches import RecurrentInput
from evorl.types.outcomes import UserError
from evorl.types.tensors import Observation, Roles, Shape, Tensors

SMALLEST_WIDTH = 32
WIDTH_STEP = 16
CHANNEL_STEP = 8
STACK_OVERHEAD = 20_000
"""Fixed cost of an additional stack, in multiplications: an update of [32, 32] networks takes about 0.7 ms of call
overhead, and 30 ns per weight and agent (batch 128, one core)."""
STACK_OVERHEAD_ON_GPU = 20_000_000
"""The same on a GPU, launched singly: that takes an H100's host about 2.5 ms, in which the GPU could update 250 more
agents with [256, 256] networks (batch 256). Of captured updates it is not known."""
SIGMA = "sigma."
"""Name prefix of the parameter that holds another parameter's noise scale."""


@dataclass(frozen=True)
class Layout:
    """Padded architecture of one network of a stack, large enough for all its `agents`."""

    architecture: Architecture
    agents: int
    first_head: bool = False
    """Only the first head is needed, so the branches of the others may be left out."""


class Network(ABC):
    """A stateless network; its parameters are stored with the agents.

    The defaults suit a feed-forward network of fixed shape.
    """

    kernel: Kernel | None = None
    """Computes hidden layers, heads and optimiser steps on a CPU where it can; None leaves them to torch."""

    @abstractmethod
    def specs(self, architecture: Architecture) -> Specs:
        """The parameters and buffers of one agent, in the order in which they are initialised and stored."""

    @abstractmethod
    def forward(
        self, layout: Layout, p: Weights, x: Observation, recurrent: RecurrentInput | None
    ) -> tuple[Tensors, Tensor | None]:
        """Map observations [P, B, ...] to the heads' outputs [P, B, outputs] and the next recurrent state [P, S, K, N].

        `p` are the stack's parameters and buffers, each [P * branches, read, produced].
        """

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Draw one agent's first parameters and buffers; by default each as its spec says."""
        return initialise(self.specs(architecture), architecture.sizes(), generator)

    def cost(self, architecture: Architecture) -> float:
        """Multiplications of a forward pass per observation; 0, the default, where all agents have the same shape.

        Raises UserError if the architecture does not fit the observation.
        """
        return 0.0

    def recurrent_shape(self, architecture: Architecture) -> tuple[int, int]:
        """The shape (K, N) of one agent's recurrent state: K numbers for each of N units."""
        return 0, 0


@dataclass(frozen=True)
class TargetRule(ABC):
    """Update rule of a target network: target += tau * (parameters - target); `hyperparameter` sets each agent's."""

    hyperparameter: str

    @abstractmethod
    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        """tau [P] for the update that is each agent's `updates`-th [P]."""


@dataclass(frozen=True)
class Polyak(TargetRule):
    """Polyak averaging (arXiv 1509.02971, section 3), with the per-agent coefficient `hyperparameter`.

    With `every` above 1, the target moves only in the first of each `every` updates, as delayed objectives do.
    """

    every: int = 1

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        rate = hyperparameters[self.hyperparameter]
        return rate if self.every == 1 else rate * (torch.remainder(updates - 1, self.every) == 0)


@dataclass(frozen=True)
class Periodic(TargetRule):
    """Hard copy (Mnih et al. 2015) every n * `times` updates, where n is the per-agent value of `hyperparameter`."""

    times: int = 1

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        period = hyperparameters[self.hyperparameter].round().clamp(min=1)
        return (torch.remainder(updates, period * self.times) == 0).float()


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


def padded(width: int) -> int:
    """Round a width up to a multiple of 16, at least 32, which suits batched products."""
    return max(SMALLEST_WIDTH, -(-width // WIDTH_STEP) * WIDTH_STEP)


def joint(architectures: Sequence[Architecture]) -> Architecture:
    """The smallest padded architecture that fits all of these, which share their structure."""
    first = architectures[0]
    widths = zip(*(a.hidden_sizes for a in architectures), strict=True)
    depths = zip(*(a.residual_layers for a in architectures), strict=True)
    layers = zip(*(a.convolutions for a in architectures), strict=True)
    return replace(
        first,
        hidden_sizes=tuple(padded(max(column)) for column in widths),
        residual_layers=tuple(max(column) for column in depths),
        convolutions=tuple(_joint_convolution(column) for column in layers),
        recurrent_size=padded(max(a.recurrent_size for a in architectures)) if first.recurrent else 0,
    )


def _joint_convolution(layers: Sequence[Convolution]) -> Convolution:
    channels = max(layer.channels for layer in layers)
    return replace(
        layers[0],
        channels=-(-channels // CHANNEL_STEP) * CHANNEL_STEP,
        residual_layers=max(layer.residual_layers for layer in layers),
    )


Architectures = Mapping[str, Architecture]
"""Architectures of one agent's networks, by name."""


def plan_stacks(
    agents: Sequence[Architectures], cost: Callable[[Architectures], float], device: torch.device
) -> list[tuple[list[int], dict[str, Layout]]]:
    """Group agents into stacks that minimise the cost of a training step; return each stack's members and layouts.

    Agents can share a stack if their networks have the same structure. `cost` returns the multiplications per
    observation over all networks. A stack costs its call overhead on `device` plus the multiplications of all members
    at their common padded size. The algorithm is greedy: starting from one stack per padded shape, it merges the pair
    that saves most, until no merge saves anything.
    """
    structures: list[Any] = [tuple(_structure(architecture) for architecture in agent.values()) for agent in agents]
    shapes: list[Any] = [tuple(map(_widths, _joint([agent]).values())) for agent in agents]
    order = sorted(range(len(agents)), key=lambda i: (structures[i], shapes[i]))
    stacks = [list(members) for _, members in groupby(order, key=lambda i: (structures[i], shapes[i]))]

    overhead = STACK_OVERHEAD if device.type == "cpu" else STACK_OVERHEAD_ON_GPU

    @cache  # Each merge leaves all pairs but those of one stack as they were.
    def together(members: tuple[int, ...]) -> float:
        return overhead + len(members) * cost(_joint([agents[i] for i in members]))

    def saving(pair: tuple[int, int]) -> float:
        first, second = tuple(stacks[pair[0]]), tuple(stacks[pair[1]])
        if structures[first[0]] != structures[second[0]]:
            return -1.0
        return together(first) + together(second) - together(first + second)

    while len(stacks) > 1:
        best = max(combinations(range(len(stacks)), 2), key=saving)
        if saving(best) <= 0:
            break
        stacks[best[0]] += stacks.pop(best[1])
    return [_laid_out(members, agents) for members in stacks]


def _joint(agents: Sequence[Architectures]) -> dict[str, Architecture]:
    """Apply `joint` to each network of these agents."""
    return {name: joint([agent[name] for agent in agents]) for name in agents[0]}


def _laid_out(members: list[int], agents: Sequence[Architectures]) -> tuple[list[int], dict[str, Layout]]:
    """Sort the members, and lay out each of their networks."""
    architectures = _joint([agents[i] for i in members])
    return sorted(members), {name: Layout(architecture, len(members)) for name, architecture in architectures.items()}


def _widths(architecture: Architecture) -> tuple[int, ...]:
    channels = (layer.channels for layer in architecture.convolutions)
    return *architecture.hidden_sizes, *channels, architecture.recurrent_size


def _structure(architecture: Architecture) -> tuple[object, ...]:
    """The attributes that agents of a stack share."""
    kernels = tuple((layer.kernel, layer.stride) for layer in architecture.convolutions)
    names = architecture.activation or "", architecture.branches, architecture.recurrent or ""
    return *names, len(architecture.hidden_sizes), architecture.layer_norm, kernels


class WeightNoise:
    """Samples factorised weight noise for a stack, independently per agent (arXiv 1706.10295, eq. 10 and 11).

    With f(x) = sgn(x) sqrt |x|, the noise of a weight is f(x_in) f(x_out), and that of a bias is f(x_out).
    """

    def __init__(self, matrices: Mapping[str, Shape], agents: int) -> None:
        """Prepare shapes; `matrices` holds (branches, inputs, outputs) of each parameter of a network."""
        self.agents = agents
        self.matrices = {name: matrices[name] for name in matrices if SIGMA + name in matrices}
        self._shapes: dict[str, Shape] = {}
        for name, (branches, read, produced) in self.matrices.items():
            self._shapes[layer_of(name)] = agents * branches, 1, produced
            if ".weight" in name:
                self._shapes[name] = agents * branches, read, 1
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]

    def draw(self, generator: torch.Generator) -> Tensors:
        """Sample noise [P, read, produced] for each weight and [P, 1, produced] for each bias, by name."""
        x = torch.randn(sum(self._sizes), generator=generator, device=generator.device)
        parts = (x.sign() * x.abs().sqrt()).split(self._sizes)
        values = {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        tensors: Tensors = {}
        for name in self.matrices:
            outputs = values[layer_of(name)]
            tensors[name] = values[name] * outputs if name in values else outputs
        return tensors


def layer_of(name: str) -> str:
    """The layer of a weight or bias, by its name; the name itself for other parameters."""
    return name.partition(".weight")[0].removesuffix(".bias")


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
        """Parameter and buffer values of `agents` agents together."""
        return agents * sum(math.prod(shape) for shape in (*self.trained.values(), *self.untrained.values()))


class StackedNetwork:
    """One network of all agents in a stack: trained `parameters`, and untrained `buffers`."""

    leaf: Tensor
    """The flat parameters [D], by which losses are differentiated."""

    def __init__(
        self,
        network: Network,
        layout: Layout,
        shapes: Shapes,
        parameters: FlatTensors,
        buffers: FlatTensors,
        learns: bool = True,
    ) -> None:
        """With `learns`, the parameters require gradients."""
        self.network = network
        self.layout = layout
        self.shapes = shapes
        self.parameters = parameters
        self.buffers = buffers
        self.leaf = parameters.flat.detach().requires_grad_(learns)
        self._matrices = parameters.matrices(shapes.matrices)
        self.use_masks()
        self._given: Weights | None = None
        self.recurrent_shape = network.recurrent_shape(layout.architecture)
        self._noise = WeightNoise(shapes.matrices, layout.agents)

    @classmethod
    def allocate(cls, network: Network, layout: Layout, shapes: Shapes, memory: Tensor) -> StackedNetwork:
        """Make a network whose parameters and buffers are views of `memory` [D]."""
        parameters = FlatTensors(shapes.trained, layout.agents, memory.device, memory)
        rest = memory[parameters.flat.numel() :]
        buffers = FlatTensors(shapes.untrained, layout.agents, memory.device, rest)
        return cls(network, layout, shapes, parameters, buffers)

    def target(self) -> StackedNetwork:
        """Make a target network with its own parameters, all zero, and shared buffers."""
        parameters = FlatTensors(self.shapes.trained, self.layout.agents, self.parameters.flat.device)
        return StackedNetwork(self.network, self.layout, self.shapes, parameters, self.buffers, learns=False)

    def __call__(self, x: Observation, recurrent: RecurrentInput | None = None) -> Tensors:
        """Map observations [P, B, ...] to the heads' outputs [P, B, outputs]."""
        return self.forward_recurrent(x, recurrent)[0]

    def forward_recurrent(self, x: Observation, recurrent: RecurrentInput | None) -> tuple[Tensors, Tensor | None]:
        """Map observations to the heads' outputs and the recurrent state [P, S, K, N] after them."""
        return self.network.forward(self.layout, self.weights, x, recurrent)

    @property
    def weights(self) -> Weights:
        """The inputs of the forward pass: parameters, buffers, and the unit shares of layers with inactive units."""
        if self._given is not None:
            return self._given
        if not torch.is_grad_enabled() or not self.leaf.requires_grad:
            return self._constant
        return Weights(self.leaf, self._matrices, self._constant.buffers)

    def gradient(self, per_sample: Tensor, weight: Tensor) -> Tensor:
        """The flat gradient [D] of the sum of `weight` [P, B] times a loss [P, B]."""
        (gradient,) = torch.autograd.grad(per_sample, self.leaf, weight)
        return gradient

    @torch.no_grad()
    def state_after(self, x: Observation, started: Tensor) -> Tensor:
        """The recurrent state [P, S, K, N] after observations [P, T * S, ...] that begin with a state of zeros.

        `started` [P, T, S] marks the starts of episodes; no gradient flows back.
        """
        state = started.new_zeros(len(started), started.shape[2], *self.recurrent_shape, dtype=torch.float32)
        if not started.shape[1]:
            return state
        _, after = self.forward_recurrent(x, RecurrentInput(state, started))
        assert after is not None
        return after

    def with_noise(self, generator: torch.Generator) -> StackedNetwork:
        """This network with newly drawn weight noise, or itself if no layer is noisy."""
        if not self._noise.matrices:
            return self
        # w = mu + sigma * noise
        weights, noise = self.weights, self._noise.draw(generator)
        noisy = {name: torch.addcmul(weights[name], weights[SIGMA + name], value) for name, value in noise.items()}
        return self.computing_with(weights.replaced(noisy))

    def frozen(self) -> StackedNetwork:
        """This network with parameters that losses are not differentiated by; gradients of its inputs still flow."""
        return self.computing_with(self._constant)

    def first_head(self) -> StackedNetwork:
        """This network for its first head alone; other heads, and what only they read, need not be computed."""
        other = copy.copy(self)
        other.layout = replace(self.layout, first_head=True)
        return other

    def computing_with(self, weights: Weights) -> StackedNetwork:
        """This network with other inputs of its forward pass."""
        other = copy.copy(self)
        other._given = weights
        return other

    def with_all_shares(self) -> Weights:
        """Weights without gradients, with the unit shares of all layers, even of those without inactive units."""
        buffers = self._buffer_matrices()
        all_shares = {key: shares(buffers[key]) for key in self.shapes.masks}
        return Weights(self._constant.flat, self._matrices, buffers | all_shares)

    def load(self, roles: Sequence[Roles]) -> None:
        """Copy the agents' parameters and buffers into the padded tensors."""
        self.parameters.load([each["parameters"] for each in roles])
        self.buffers.load([each["buffers"] for each in roles])
        self.use_masks()

    def true_shapes(self, architecture: Architecture) -> dict[str, Shape]:
        """Unpadded shapes of one agent's parameters and buffers."""
        sizes = architecture.sizes()
        return {key: spec.shape(sizes) for key, spec in self.network.specs(architecture).items()}

    def _buffer_matrices(self) -> Tensors:
        shapes = self.buffers.matrices(self.shapes.matrices)
        return {name: self.buffers.views[name].detach().view(shape) for name, shape in shapes.items()}

    def use_masks(self) -> None:
        """Replace each mask by its unit shares for layer norm, or drop it if all units are active."""
        buffers = self._buffer_matrices()
        for key in self.shapes.masks:
            active = buffers.pop(key)
            if not bool((active == 1).all()):
                buffers[key] = shares(active)
        self._constant = Weights(self.parameters.flat.detach(), self._matrices, buffers)


@dataclass
class Stack:
    """Agents of compatible architectures: `members` index the population, hyperparameters are tensors [P].

    A learner adds the `target_networks`. `noise_shape` is the shape [K, N], per environment, of exploration noise that
    persists across steps.
    """

    members: slice | Tensor
    networks: dict[str, StackedNetwork]
    hyperparameters: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)
    target_networks: dict[str, StackedNetwork] = field(default_factory=dict)
    noise_shape: tuple[int, int] = 0, 0

    @property
    def recurrent_units(self) -> int:
        """Units N of the agents' recurrent state, including exploration noise; 0 if there is none."""
        return max(self.noise_shape[1], *(network.recurrent_shape[1] for network in self.networks.values()))


def new_tensors(networks: Mapping[str, NetworkSpec], agent: Agent, generator: torch.Generator) -> None:
    """Initialise an agent: parameters, zero moments, and target networks equal to the parameters where specified."""
    for name, spec in networks.items():
        values = spec.network.initialise(agent.architectures[name], generator)
        roles = fresh_roles(spec.network.specs(agent.architectures[name]), values)
        agent.tensors[name] = {role: tensors for role, tensors in roles.items() if role != "target" or spec.target}
        agent.state.updates[name] = 0.0


def check_network(agent: Agent, name: str, spec: NetworkSpec, where: str) -> None:
    """Raise UserError unless the tensors of one of `agent`'s networks match its architecture."""
    shape, roles = agent.architectures[name], agent.tensors[name]
    if (spec.target is not None) != ("target" in roles):
        raise UserError(f"{where}: {name} {'lacks a' if spec.target else 'has an unexpected'} target network")
    layers = shape.layers + len(shape.convolutions) + sum(layer.residual_layers for layer in shape.convolutions)
    # Every layer has tensors, so a corrupt description cannot request more layers than its file holds tensors.
    if layers > len(roles["parameters"]):
        raise UserError(f"{where}: {name} has {layers} layers but only {len(roles['parameters'])} parameter tensors")
    sizes, specs = shape.sizes(), spec.network.specs(shape)
    shapes = {key: (one.shape(sizes), torch.float32) for key, one in specs.items()}
    for role, tensors in roles.items():
        expected = {key: shapes[key] for key, one in specs.items() if one.trained == (role != "buffers")}
        check_tensors(tensors, expected, f"{where}: {role} of {name}")
