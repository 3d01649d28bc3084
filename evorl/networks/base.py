"""The interface of networks, and the grouping of agents into stacks with a padded architecture.

Axes: P agents, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from evorl.config import Network as NetworkSettings
from evorl.envs.spaces import ObservationSpecs
from evorl.networks.dense import Tape
from evorl.networks.layers import Span
from evorl.networks.parameters import Specs
from evorl.types import Architecture, Convolution, Observation, RecurrentInput, Streams, Tensors

SMALLEST_WIDTH = 32
WIDTH_STEP = 16
CHANNEL_STEP = 8
STACK_OVERHEAD = 20_000
"""Fixed cost of an additional stack, in multiplications: an update of [32, 32] networks takes about 0.7 ms of call
overhead, and 30 ns per weight and agent (batch 128, one core)."""


@dataclass(frozen=True)
class Layout:
    """Padded architecture of one network of a stack, large enough for all its agents, and their activations."""

    architecture: Architecture
    spans: tuple[Span, ...]


def padded(width: int) -> int:
    """Round a width up to a multiple of 16, at least 32, which suits batched products."""
    return max(SMALLEST_WIDTH, -(-width // WIDTH_STEP) * WIDTH_STEP)


def joint(architectures: Sequence[Architecture]) -> Architecture:
    """Return the smallest padded architecture that fits all of these architectures of one kind."""
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
    agents: Sequence[Architectures], cost: Callable[[Architectures], float]
) -> list[tuple[list[int], dict[str, Layout]]]:
    """Group agents into stacks that minimise the cost of a training step; return each stack's members and layouts.

    Agents can share a stack if their networks are of the same kind. `cost` returns the multiplications per observation
    over all networks. A stack costs its call overhead plus the multiplications of all members at their common padded
    size. The algorithm is greedy: starting from one stack per padded shape, it merges the pair that saves most, until
    no merge saves anything.
    """
    kinds: list[Any] = [tuple(_kind(architecture) for architecture in agent.values()) for agent in agents]
    shapes: list[Any] = [tuple(map(_widths, _joint([agent]).values())) for agent in agents]
    order = sorted(range(len(agents)), key=lambda i: (kinds[i], shapes[i]))
    stacks = [list(members) for _, members in groupby(order, key=lambda i: (kinds[i], shapes[i]))]

    def together(members: list[int]) -> float:
        return STACK_OVERHEAD + len(members) * cost(_joint([agents[i] for i in members]))

    def saving(pair: tuple[int, int]) -> float:
        first, second = stacks[pair[0]], stacks[pair[1]]
        if kinds[first[0]] != kinds[second[0]]:
            return -1.0
        return together(first) + together(second) - together(first + second)

    while len(stacks) > 1:
        best = max(combinations(range(len(stacks)), 2), key=saving)
        if saving(best) <= 0:
            break
        stacks[best[0]] += stacks.pop(best[1])
    return [_laid_out(members, agents) for members in stacks]


def _joint(agents: Sequence[Architectures]) -> dict[str, Architecture]:
    """Return for each network the smallest padded architecture that fits all these agents."""
    return {name: joint([agent[name] for agent in agents]) for name in agents[0]}


def _laid_out(members: list[int], agents: Sequence[Architectures]) -> tuple[list[int], dict[str, Layout]]:
    """Return the members, sorted so that equal activations are adjacent, and the layouts of their networks."""
    activations = {i: [architecture.activation or "" for architecture in agents[i].values()] for i in members}
    members = sorted(members, key=lambda i: (*activations[i], i))
    architectures = _joint([agents[i] for i in members])
    columns = zip(*(activations[i] for i in members), strict=True)
    return members, {
        name: Layout(architecture, _spans(column))
        for (name, architecture), column in zip(architectures.items(), columns, strict=True)
    }


def _spans(activations: Sequence[str]) -> tuple[Span, ...]:
    """Return the runs of equal activation names."""
    spans: list[Span] = []
    for name, run in groupby(activations):
        start = spans[-1][2] if spans else 0
        spans.append((name, start, start + len(list(run))))
    return tuple(spans)


def _widths(architecture: Architecture) -> tuple[int, ...]:
    channels = (layer.channels for layer in architecture.convolutions)
    return *architecture.hidden_sizes, *channels, architecture.recurrent_size


def _kind(architecture: Architecture) -> tuple[object, ...]:
    """Return the attributes that agents of a stack share, with kernel sizes: a padded kernel would be trained."""
    kernels = tuple((layer.kernel, layer.stride, layer.padding) for layer in architecture.convolutions)
    flags = len(architecture.hidden_sizes), architecture.layer_norm, architecture.streams, architecture.recurrent or ""
    return *flags, kernels


class Network(Protocol):
    """A stateless network; its parameters are stored with the agents."""

    def specs(self, architecture: Architecture) -> Specs:
        """Return the parameter specs of one agent with this architecture."""

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Return newly initialised parameters of one agent."""

    def cost(self, architecture: Architecture) -> float:
        """Return the multiplications of one forward pass per observation. Raises UserError if the shapes do not fit."""

    def recurrent_shape(self, architecture: Architecture) -> tuple[int, int]:
        """Return the numbers per recurrent unit and the number of units; zeros for a feed-forward network."""

    def forward(
        self,
        layout: Layout,
        p: Tensors,
        x: Observation,
        recurrent: RecurrentInput | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensors, Tensor | None]:
        """Return the heads' outputs [P, B, outputs] for observations [P, B, ...], and the next recurrent state.

        `p` are the stack's parameters, each [P * copies, read, produced]. A `tape` may record the call for the backward
        pass.
        """

    def forward_pair(
        self, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return the outputs for `x`, and without gradients for `following`, which has the same shape."""

    def without_layer(self, architecture: Architecture, index: int, tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
        """Return one agent's `tensors` without hidden layer `index`, which must not be the last.

        Also return a mapping from each new tensor to the tensor of the next layer that it replaces, by name.
        """


def forward_apart(
    network: Network, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
) -> tuple[Tensors, Tensors]:
    """Implement `forward_pair` by two forward passes."""
    outputs, _ = network.forward(layout, p, x, None, tape)
    with torch.no_grad():
        return outputs, network.forward(layout, p, following)[0]


def initial_architecture(
    settings: NetworkSettings, parts: ObservationSpecs, streams: Streams = "shared"
) -> Architecture:
    """Return the configured architecture of a network that reads these observation parts."""
    if settings.name == "module":
        return Architecture()
    images = any(part.kind == "image" for part in parts.values())
    layers = [Convolution(**layer.model_dump()) for layer in settings.convolutions] if images else []
    return Architecture(
        hidden_sizes=settings.hidden_sizes,
        residual_layers=(0,) * len(settings.hidden_sizes),
        activation=settings.activation,
        layer_norm=bool(settings.layer_norm),
        streams=streams,
        convolutions=tuple(layers),
        recurrent=settings.recurrent,
        recurrent_size=settings.recurrent_size if settings.recurrent else 0,
    )
