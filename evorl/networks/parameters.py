"""Parameters of one agent, and of a stack of agents in one flat buffer. Axes: P agents, D all values of a stack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evorl.config.fields import Initialisation
from evorl.types import Tensors

Fill = Literal["uniform", "orthogonal", "zeros", "ones"] | tuple[float, ...]
Shape = tuple[int, ...]
HIDDEN_GAIN: Mapping[Initialisation, float] = {"uniform": 1.0, "orthogonal": math.sqrt(2)}
"""The gain of layers that an activation follows."""
NEAR_ZERO_GAIN = 0.01


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of one agent: a linear map from the axes that it `reads` to those that it `produces`.

    Axes are group names, whose width the architecture gives, or fixed sizes. What grows on an axis that is read starts
    at zero, so that growth changes nothing. There may be several `copies`, on a first axis of their own. `fill` is the
    first value: `uniform` is U(-1/sqrt(n), 1/sqrt(n)) with n the size of the axes read (LeCun 1998), `orthogonal` a
    matrix from all that is read to all that is produced whose rows or columns, whichever are fewer, are orthonormal, in
    each copy for itself (Saxe et al., arXiv 1312.6120); these and `ones` are multiplied by `gain`. Numbers stand for
    the places of the first axis produced. `newborn` is the value of units that are added later, where it differs. A
    `mask` says which units count, and is left out of a stack in which all do.
    """

    reads: tuple[str | int, ...]
    produces: tuple[str | int, ...]
    fill: Fill
    newborn: Fill | None = None
    trained: bool = True
    copies: int | None = None
    gain: float = 1.0
    mask: bool = False

    @property
    def axes(self) -> tuple[str | int, ...]:
        return (*(() if self.copies is None else (self.copies,)), *self.reads, *self.produces)

    def axes_read(self, group: str) -> list[int]:
        """Return the positions of the axes on which this parameter reads `group`."""
        first = 0 if self.copies is None else 1
        return [first + position for position, axis in enumerate(self.reads) if axis == group]

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        return _sizes(self.axes, sizes)

    def matrix(self, sizes: Mapping[str, int]) -> Shape:
        """Return the shape in which a stack computes with it: copies, and how much is read and produced."""
        return self.copies or 1, math.prod(_sizes(self.reads, sizes)), math.prod(_sizes(self.produces, sizes))

    def filled(self, fill: Fill, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Return new values."""
        shape = self.shape(sizes)
        if isinstance(fill, tuple):
            return torch.tensor(fill).unsqueeze(-1).expand(shape).clone()
        if fill in ("zeros", "ones"):
            return torch.full(shape, float(fill == "ones") * self.gain)
        copies, read, produced = self.matrix(sizes)
        if fill == "orthogonal":
            matrices = [_orthogonal(read, produced, generator) for _ in range(copies)]
            return torch.stack(matrices).view(shape).mul_(self.gain)
        bound = self.gain / math.sqrt(read)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


Specs = dict[str, ParameterSpec]


def _orthogonal(read: int, produced: int, generator: torch.Generator) -> Tensor:
    # In double precision, and rounded: each rank draws the first agents for itself, and the decomposition may differ in
    # its last place from one kind of CPU to another.
    matrix = torch.empty(read, produced, dtype=torch.float64)
    return torch.nn.init.orthogonal_(matrix, generator=generator).float()


def _sizes(axes: tuple[str | int, ...], sizes: Mapping[str, int]) -> Shape:
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in axes)


def initialise(specs: Specs, sizes: Mapping[str, int], generator: torch.Generator) -> Tensors:
    """Return fresh parameters of one agent."""
    return {name: spec.filled(spec.fill, sizes, generator) for name, spec in specs.items()}


def moved_up(name: str, index: int) -> str:
    """Return the name of a hidden layer's parameter once layer `index` before it is gone."""
    kind, number, *rest = name.split(".")
    if kind == "hidden" and int(number) > index:
        return ".".join((kind, str(int(number) - 1), *rest))
    return name


class FlatTensors:
    """Named [P, ...] tensors that share one flat buffer [D], parameter after parameter.

    Each is contiguous, which batched products want (1.4x over strided rows of a [P, D] matrix at 16 agents), and one
    operation on `flat` serves them all.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], agents: int, device: torch.device, memory: Tensor | None = None
    ) -> None:
        """Take the beginning of `memory` [...] if there is some, else memory of their own, all zero."""
        self.agents = agents
        self.shapes = dict(shapes)
        size = agents * sum(math.prod(shape) for shape in shapes.values())
        self.flat = torch.zeros(size, device=device) if memory is None else memory[:size]
        self.views: Tensors = {}
        offset = 0
        for name, shape in self.shapes.items():
            size = agents * math.prod(shape)
            self.views[name] = self.flat[offset : offset + size].view(agents, *shape)
            offset += size

    def matrices(self, shapes: Mapping[str, Shape]) -> Tensors:
        """Return views [P * copies, read, produced], given each tensor's copies, read and produced."""
        return {
            name: view.detach().view(self.agents * shapes[name][0], *shapes[name][1:])
            for name, view in self.views.items()
        }

    def rows(self, flat: Tensor) -> list[Tensor]:
        """Return for each parameter a view [..., P, size] of a tensor [..., D] that is laid out like `flat`.

        Numbers of each agent [P] are spread over its values by a copy into these: 34 us for 46,000 values where
        gathering by an index took 135 (4 agents), 68 for 185,000 where it took 768 (16 agents).
        """
        sizes = [view.numel() for view in self.views.values()]
        return [part.unflatten(-1, (self.agents, -1)) for part in flat.split(sizes, -1)] if sizes else []

    def spread(self, numbers: Tensor) -> Tensor:
        """Return numbers [P] of each agent at each of its values [D]."""
        spread = torch.empty_like(self.flat)
        for row in self.rows(spread):
            row.copy_(numbers.unsqueeze(-1))
        return spread

    def load(self, agents: Sequence[Tensors]) -> None:
        """Take over the agents' values, each in the leading corner of its padded room; the padding is zero."""
        self.flat.zero_()
        for name, view in self.views.items():
            for room, tensors in zip(view, agents, strict=True):
                if name in tensors:
                    room[_corner(tensors[name].shape)] = tensors[name].to(room)

    def unload(self, agent: int, shapes: Mapping[str, Shape]) -> Tensors:
        """Return the values of one agent in its true shapes, on the CPU and in memory of their own."""
        return {name: self.views[name][agent][_corner(shape)].detach().cpu().clone() for name, shape in shapes.items()}


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)
