"""The division of agents into stacks, and the padded architecture of each stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any

from evorl.networks.layers import Span
from evorl.types import Architecture, Convolution

SMALLEST_WIDTH = 32
WIDTH_STEP = 16
CHANNEL_STEP = 8
STACK_OVERHEAD = 20_000
"""The fixed cost of one more stack, in multiplications: an update of [32, 32] networks spends about 0.7 ms on calls,
and 30 ns on each weight of each agent (batch 128, one core)."""


@dataclass(frozen=True)
class Layout:
    """The architecture of a network of a stack, wide and deep enough for all its agents, and their activations."""

    architecture: Architecture
    spans: tuple[Span, ...]


def padded(width: int) -> int:
    """Return the next multiple of 16, from 32, which batched products want."""
    return max(SMALLEST_WIDTH, -(-width // WIDTH_STEP) * WIDTH_STEP)


def joint(architectures: Sequence[Architecture]) -> Architecture:
    """Return the smallest padded architecture that has room for all of these, which are of one kind."""
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
"""The architectures of one agent's networks, by name."""


def plan_stacks(
    agents: Sequence[Architectures], cost: Callable[[Architectures], float]
) -> list[tuple[list[int], dict[str, Layout]]]:
    """Divide agents into stacks so that a training step is cheap: each stack's members, and its networks' layouts.

    Agents can share a stack where each of their networks is of one kind. `cost` is the number of multiplications for
    one observation, over all networks. A stack costs its calls plus those of all its members at their common padded
    size. Starting from one stack for each padded shape, the two whose union saves most are joined until no union saves
    anything.
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
    """Return for each network the smallest padded architecture that has room for those of all these agents."""
    return {name: joint([agent[name] for agent in agents]) for name in agents[0]}


def _laid_out(members: list[int], agents: Sequence[Architectures]) -> tuple[list[int], dict[str, Layout]]:
    """Return the members, those with the same activations side by side, and their networks' layouts."""
    activations = {i: [architecture.activation or "" for architecture in agents[i].values()] for i in members}
    members = sorted(members, key=lambda i: (*activations[i], i))
    architectures = _joint([agents[i] for i in members])
    columns = zip(*(activations[i] for i in members), strict=True)
    return members, {
        name: Layout(architecture, _spans(column))
        for (name, architecture), column in zip(architectures.items(), columns, strict=True)
    }


def _spans(activations: Sequence[str]) -> tuple[Span, ...]:
    """Return the runs of equal names."""
    spans: list[Span] = []
    for name, run in groupby(activations):
        start = spans[-1][2] if spans else 0
        spans.append((name, start, start + len(list(run))))
    return tuple(spans)


def _widths(architecture: Architecture) -> tuple[int, ...]:
    channels = (layer.channels for layer in architecture.convolutions)
    return *architecture.hidden_sizes, *channels, architecture.recurrent_size


def _kind(architecture: Architecture) -> tuple[object, ...]:
    """Return what agents of a stack have in common: a smaller kernel cannot be padded, as the padding would learn."""
    kernels = tuple((layer.kernel, layer.stride, layer.padding) for layer in architecture.convolutions)
    flags = len(architecture.hidden_sizes), architecture.layer_norm, architecture.streams, architecture.recurrent or ""
    return *flags, kernels
