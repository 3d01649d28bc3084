"""The division of agents into stacks, and the padded architecture of each stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The architecture that a stack computes with, wide and deep enough for all its agents, and their activations."""

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


def plan_stacks(
    architectures: Sequence[Architecture], cost: Callable[[Architecture], float]
) -> list[tuple[list[int], Layout]]:
    """Divide agents into stacks so that a training step is cheap: the members of each stack, and its layout.

    `cost` is the number of multiplications for one observation. A stack costs its calls plus those of all its members
    at their common padded size. Starting from one stack for each padded shape, the two whose union saves most are
    joined until no union saves anything.
    """
    shapes: list[Any] = [(_kind(architecture), _widths(joint([architecture]))) for architecture in architectures]
    order = sorted(range(len(shapes)), key=shapes.__getitem__)
    stacks = [list(members) for _, members in groupby(order, key=shapes.__getitem__)]

    def together(members: list[int]) -> float:
        return STACK_OVERHEAD + len(members) * cost(joint([architectures[i] for i in members]))

    def saving(pair: tuple[int, int]) -> float:
        first, second = stacks[pair[0]], stacks[pair[1]]
        if _kind(architectures[first[0]]) != _kind(architectures[second[0]]):
            return -1.0
        return together(first) + together(second) - together(first + second)

    while len(stacks) > 1:
        best = max(combinations(range(len(stacks)), 2), key=saving)
        if saving(best) <= 0:
            break
        stacks[best[0]] += stacks.pop(best[1])
    return [_laid_out(members, architectures) for members in stacks]


def _laid_out(members: list[int], architectures: Sequence[Architecture]) -> tuple[list[int], Layout]:
    members = sorted(members, key=lambda i: (architectures[i].activation or "", i))
    spans: list[Span] = []
    for name, group in groupby(members, key=lambda i: architectures[i].activation or ""):
        start = spans[-1][2] if spans else 0
        spans.append((name, start, start + len(list(group))))
    return members, Layout(joint([architectures[i] for i in members]), tuple(spans))


def _widths(architecture: Architecture) -> tuple[int, ...]:
    channels = (layer.channels for layer in architecture.convolutions)
    return *architecture.hidden_sizes, *channels, architecture.recurrent_size


def _kind(architecture: Architecture) -> tuple[object, ...]:
    """Return what agents of a stack have in common: a smaller kernel cannot be padded, as the padding would learn."""
    kernels = tuple((layer.kernel, layer.stride, layer.padding) for layer in architecture.convolutions)
    flags = len(architecture.hidden_sizes), architecture.layer_norm, architecture.streams, architecture.recurrent or ""
    return *flags, kernels
