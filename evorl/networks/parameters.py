"""Parameters of one agent, and of a stack of agents in one flat buffer. Axes: P agents, D all values of a stack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evorl.types import Tensors

Fill = Literal["uniform", "zeros", "ones"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterSpec:
    """What one parameter of one agent is.

    `axes` are group names, whose width the architecture gives, or fixed sizes. A parameter reads all axes but the last
    and produces the last: what grows on an axis that is read starts at zero, so that growth changes nothing.
    `fill` is the first value: `uniform` is U(-1/sqrt(n), 1/sqrt(n)) with n the size of the axes read (LeCun 1998).
    `newborn` is the value of units that are added later, where it differs.
    """

    axes: tuple[str | int, ...]
    fill: Fill
    newborn: Fill | None = None
    trained: bool = True

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)


Specs = dict[str, ParameterSpec]


def filled(fill: Fill, shape: Shape, fan_in: int, generator: torch.Generator) -> Tensor:
    """A new parameter of this shape."""
    if fill == "uniform":
        bound = 1 / math.sqrt(fan_in)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.zeros(shape) if fill == "zeros" else torch.ones(shape)


def initialise(specs: Specs, sizes: Mapping[str, int], generator: torch.Generator) -> Tensors:
    """Fresh parameters of one agent."""
    shapes = {name: spec.shape(sizes) for name, spec in specs.items()}
    return {
        name: filled(spec.fill, shapes[name], math.prod(shapes[name][:-1]), generator) for name, spec in specs.items()
    }


class FlatTensors:
    """Named [P, ...] tensors that share one flat buffer [D], parameter after parameter.

    Each is contiguous, which batched products want (1.4x over strided rows of a [P, D] matrix at 16 agents), and one
    operation on `flat` serves them all.
    """

    def __init__(self, shapes: Mapping[str, Shape], agents: int, device: torch.device) -> None:
        self.agents = agents
        self.shapes = dict(shapes)
        self.flat = torch.zeros(agents * sum(math.prod(shape) for shape in shapes.values()), device=device)
        self.views: Tensors = {}
        offset = 0
        for name, shape in self.shapes.items():
            size = agents * math.prod(shape)
            self.views[name] = self.flat[offset : offset + size].view(agents, *shape)
            offset += size

    def trainable(self) -> Tensors:
        """The same memory as leaves of the autograd graph."""
        return {name: view.detach().requires_grad_() for name, view in self.views.items()}

    def agent_index(self) -> Tensor:
        """The agent [D] that each value of `flat` belongs to."""
        index = torch.arange(self.agents, device=self.flat.device)
        parts = [index.repeat_interleave(math.prod(shape)) for shape in self.shapes.values()]
        return torch.cat(parts) if parts else index[:0]

    def load(self, agents: Sequence[Tensors]) -> None:
        """Take over the agents' values, each in the leading corner of its padded room; the padding is zero."""
        self.flat.zero_()
        for name, view in self.views.items():
            for room, tensors in zip(view, agents, strict=True):
                if name in tensors:
                    room[_corner(tensors[name].shape)] = tensors[name].to(room)

    def unload(self, agent: int, shapes: Mapping[str, Shape]) -> Tensors:
        """The values of one agent in its true shapes, on the CPU and in memory of their own."""
        return {name: self.views[name][agent][_corner(shape)].detach().cpu().clone() for name, shape in shapes.items()}


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)
