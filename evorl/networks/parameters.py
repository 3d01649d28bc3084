"""Parameter specs of one agent, and growth that preserves its function.

The tensors of one network of one agent are grouped by role (`types.ROLES`). `exp_avg` and `exp_avg_sq` are Adam's
first and second moments.

New weights of a trained agent start with an `exp_avg` of zero and the average `exp_avg_sq` of comparable older weights.
Adam's bias correction counts the agent's updates, so weights whose `exp_avg_sq` started at zero would step by 3 to 6.5
times the learning rate in their first ten updates. Where a first layer grew from 64 to 96 units after 2,000 updates,
the first update changed Q by 0.0166 on average, compared with 0.0032 without growth. With the average `exp_avg_sq` it
is 0.0038; with an update count per weight it would be 0.0074.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evorl.config.fields import Initialisation
from evorl.types.agents import EXP_AVG, EXP_AVG_SQ
from evorl.types.tensors import Roles, Shape, Tensors

Fill = Literal["uniform", "orthogonal", "zeros", "ones"] | tuple[float, ...]
HIDDEN_GAIN: Mapping[Initialisation, float] = {"uniform": 1.0, "orthogonal": math.sqrt(2)}
"""Initialisation gain of layers followed by an activation."""
NEAR_ZERO_GAIN = 0.01


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of one agent: a linear map from the axes that it `reads` to the axes that it `produces`.

    Axes are group names, whose widths the architecture gives, or fixed sizes. Growth along an input axis fills with
    zeros, so it preserves the function. With `branches`, there is a leading axis of them. `fill` is the initialisation:
    `uniform` is U(-1/sqrt(n), 1/sqrt(n)) with fan-in n (Glorot & Bengio 2010, eq. 1); `orthogonal` is, per branch, a
    matrix from all inputs to all outputs with orthonormal rows or columns, whichever are fewer (Saxe et al., arXiv
    1312.6120). In a layer that reads several observation parts, each part has its own fan-in: beside a wide
    observation, a critic's weights on a few actions start larger than in a joint layer. These and `ones` are multiplied
    by `gain`. A tuple of numbers gives one constant per index of the first output axis. `newborn` is the initialisation
    of units added later, if different. A `mask` marks the units that count, and is omitted from a stack in which all
    do. A parameter with `of_noise` scales exploration noise: it passes on no unit's output, and does not count towards
    a unit's importance.
    """

    reads: tuple[str | int, ...]
    produces: tuple[str | int, ...]
    fill: Fill
    newborn: Fill | None = None
    trained: bool = True
    branches: int | None = None
    gain: float = 1.0
    mask: bool = False
    of_noise: bool = False

    @property
    def is_weight(self) -> bool:
        """True for weights, which are drawn at random; biases, gains and scales start at constants."""
        return self.trained and self.fill in ("uniform", "orthogonal")

    @property
    def reads_constant(self) -> bool:
        """True for biases, gains and scales. A weight may read a single number, too."""
        return self.reads == (1,) and not self.is_weight

    @property
    def axes(self) -> tuple[str | int, ...]:
        return (*(() if self.branches is None else (self.branches,)), *self.reads, *self.produces)

    def axes_read(self, group: str) -> list[int]:
        """Indices of the axes on which this parameter reads `group`."""
        first = 0 if self.branches is None else 1
        return [first + position for position, axis in enumerate(self.reads) if axis == group]

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        return _sizes(self.axes, sizes)

    def matrix(self, sizes: Mapping[str, int]) -> Shape:
        """The shape (branches, inputs, outputs) for batched products."""
        return self.branches or 1, math.prod(_sizes(self.reads, sizes)), math.prod(_sizes(self.produces, sizes))

    def filled(self, fill: Fill, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Draw a tensor as `fill` says."""
        shape = self.shape(sizes)
        if isinstance(fill, tuple):
            return torch.tensor(fill).unsqueeze(-1).expand(shape).clone()
        if fill in ("zeros", "ones"):
            return torch.full(shape, float(fill == "ones") * self.gain)
        branches, read, produced = self.matrix(sizes)
        if fill == "orthogonal":
            # Computed in float64 and rounded: each rank draws the first agents itself, and the decomposition may differ
            # in its last digit between kinds of CPU.
            matrices = torch.empty(branches, read, produced, dtype=torch.float64)
            for matrix in matrices:
                torch.nn.init.orthogonal_(matrix, generator=generator)
            return matrices.float().view(shape).mul_(self.gain)
        bound = self.gain / math.sqrt(read)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


Specs = dict[str, ParameterSpec]


def _sizes(axes: tuple[str | int, ...], sizes: Mapping[str, int]) -> Shape:
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in axes)


def initialise(specs: Specs, sizes: Mapping[str, int], generator: torch.Generator) -> Tensors:
    """Draw the parameters of one agent in the order of their specs."""
    return {name: spec.filled(spec.fill, sizes, generator) for name, spec in specs.items()}


MOMENTS = (EXP_AVG, EXP_AVG_SQ)


def fresh_roles(specs: Specs, values: Tensors) -> Roles:
    """Group new `values` by role, with targets equal to the parameters and zero moments."""
    parameters = {name: value for name, value in values.items() if specs[name].trained}
    return {
        "parameters": parameters,
        "buffers": {name: value for name, value in values.items() if not specs[name].trained},
        "target": {name: value.clone() for name, value in parameters.items()},
        **{role: {name: torch.zeros_like(value) for name, value in parameters.items()} for role in MOMENTS},
    }


def joined(roles: Roles, more: Roles) -> Roles:
    """Merge two sets of tensors, role by role."""
    return {role: tensors | more[role] for role, tensors in roles.items()}


def newborn_exp_avg_sq(value: Tensor, older: Sequence[Tensor], branches: int | None) -> Tensor:
    """Adam's second moment for a new parameter `value`: per branch, the mean over `older` weights.

    Branches are averaged separately because policy and value gradients differ by orders of magnitude. An agent that was
    never updated has zeros there, and so have its new weights.
    """
    means = torch.cat([exp_avg_sq.reshape(branches or 1, -1) for exp_avg_sq in older], 1).mean(1)
    return means.view(-1, *(1 for _ in value.shape[1:])).expand_as(value).clone()


def added_exp_avg_sq(added: Specs, specs: Specs, roles: Roles) -> Tensors:
    """Second moments for entirely new parameters `added` to those of `specs`.

    Weights take the mean over weights that produce the same units; biases and scales take that over biases and scales.
    """
    return {
        name: newborn_exp_avg_sq(
            roles["parameters"][name],
            [
                roles[EXP_AVG_SQ][other]
                for other, old in specs.items()
                if old.trained and old.produces == new.produces and old.reads_constant == new.reads_constant
            ],
            new.branches,
        )
        for name, new in added.items()
        if new.trained
    }


def grow(specs: Specs, sizes: Mapping[str, int], roles: Roles, group: str, generator: torch.Generator) -> Roles:
    """Widen `group` to its entry in `sizes`, in the tensors of all roles.

    New units have random incoming and zero outgoing weights. This preserves the function, which is the goal of Net2Net
    (arXiv 1511.05641), in a simpler way, and the first gradient step can use the new units.
    """
    templates = {
        name: _template(spec, sizes, group, tensors[name].shape, generator)
        for name, spec in specs.items()
        if group in spec.axes
        for tensors in (roles["parameters"] if spec.trained else roles["buffers"],)
    }
    moments = {
        EXP_AVG: {name: torch.zeros_like(template) for name, template in templates.items()},
        EXP_AVG_SQ: {
            name: newborn_exp_avg_sq(template, [roles[EXP_AVG_SQ][name]], specs[name].branches)
            for name, template in templates.items()
            if specs[name].trained
        },
    }
    return {role: _extended(moments.get(role, templates), tensors) for role, tensors in roles.items()}


def shrink(specs: Specs, roles: Roles, group: str, kept: Tensor) -> Roles:
    """Keep only the `kept` units of `group`; layer norm statistics then include all remaining units."""
    shrunk = {role: dict(tensors) for role, tensors in roles.items()}
    for role, tensors in shrunk.items():
        for name in tensors:
            for axis, axis_group in enumerate(specs[name].axes):
                if axis_group == group:
                    tensors[name] = tensors[name].index_select(axis, kept)
                    if role == "buffers":
                        tensors[name].fill_(1.0)
    return shrunk


def importance(specs: Specs, parameters: Tensors, group: str) -> Tensor:
    """The sum [N] of each unit's absolute outgoing weights, for the units of `group`."""
    read = [
        parameters[name].abs().movedim(axis, 0).flatten(1).sum(1)
        for name, spec in specs.items()
        if spec.trained and not spec.of_noise
        for axis in spec.axes_read(group)
    ]
    return torch.stack(read).sum(0)


def _template(
    spec: ParameterSpec, sizes: Mapping[str, int], group: str, old: torch.Size, generator: torch.Generator
) -> Tensor:
    """Draw a grown parameter for its new units; the caller overwrites the leading corner with the old values."""
    template = spec.filled(spec.newborn or spec.fill, sizes, generator)
    for axis in spec.axes_read(group):
        template.narrow(axis, old[axis], template.shape[axis] - old[axis]).zero_()
    return template


def _extended(templates: Tensors, tensors: Tensors) -> Tensors:
    extended = dict(tensors)
    for name in templates.keys() & tensors.keys():
        extended[name] = templates[name].clone()
        extended[name][tuple(slice(size) for size in tensors[name].shape)] = tensors[name]
    return {name: extended[name] for name in tensors}
