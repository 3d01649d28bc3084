"""Which agents share a stack, and what the stack computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise

from evorl.networks.layers import Span
from evorl.types import Architecture

SMALLEST_WIDTH = 32
STACK_OVERHEAD = 20_000
"""The fixed cost of one more stack, in weights trained: an update of [32, 32] networks spends about 0.7 ms on calls,
and 30 ns on each weight of each agent (batch 128, one core)."""


@dataclass(frozen=True)
class Layout:
    """The architecture that a stack computes with, wide and deep enough for all its agents, and who activates how."""

    architecture: Architecture
    spans: tuple[Span, ...]


def padded(width: int) -> int:
    """The next power of two, from 32."""
    return max(SMALLEST_WIDTH, 1 << (width - 1).bit_length())


def joint(architectures: Sequence[Architecture]) -> Architecture:
    """The smallest padded architecture that has room for all of these; they must have equally many hidden sizes."""
    widths = zip(*(a.hidden_sizes for a in architectures), strict=True)
    depths = zip(*(a.residual_layers for a in architectures), strict=True)
    return replace(
        architectures[0],
        hidden_sizes=tuple(padded(max(column)) for column in widths),
        residual_layers=tuple(max(column) for column in depths),
    )


def plan_stacks(
    architectures: Sequence[Architecture], inputs: int = 0, outputs: int = 0
) -> list[tuple[list[int], Layout]]:
    """Divide agents into stacks so that a training step is cheap: the members of each stack, and its layout.

    `inputs` and `outputs` are the widths of what the networks read and put out.

    A stack costs its calls plus the weights of all its members at their common padded size. Starting from one stack for
    each padded shape, the two whose union saves most are joined until no union saves anything.
    """
    shapes = [(_kind(architecture), joint([architecture]).hidden_sizes) for architecture in architectures]
    order = sorted(range(len(shapes)), key=shapes.__getitem__)
    stacks = [list(members) for _, members in groupby(order, key=shapes.__getitem__)]

    def saving(pair: tuple[int, int]) -> float:
        first, second = stacks[pair[0]], stacks[pair[1]]
        if _kind(architectures[first[0]]) != _kind(architectures[second[0]]):
            return -1.0
        groups = ([architectures[i] for i in members] for members in (first, second, first + second))
        cost = [_cost(group, inputs, outputs) for group in groups]
        return cost[0] + cost[1] - cost[2]

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


def _kind(architecture: Architecture) -> tuple[int, bool, bool]:
    return len(architecture.hidden_sizes), architecture.layer_norm, architecture.dueling


def _cost(architectures: Sequence[Architecture], inputs: int, outputs: int) -> float:
    common = joint(architectures)
    widths = common.hidden_sizes
    weights = sum(a * b for a, b in pairwise((inputs, *widths, outputs)))
    weights += sum(width * width * depth for width, depth in zip(widths, common.residual_layers, strict=True))
    return STACK_OVERHEAD + len(architectures) * weights
