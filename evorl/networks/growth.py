"""Change the width of one agent's layers. Growth leaves the function that the network computes as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from evorl.networks.parameters import ParameterSpec, Specs, filled
from evorl.types import Tensors


def grow(
    specs: Specs, sizes: Mapping[str, int], tensors: Tensors, group: str, generator: torch.Generator
) -> tuple[Tensors, Tensors]:
    """`tensors` with `group` as wide as `sizes` says, and templates that hold the new units' values.

    New units read with fresh weights and are read with zero weights (Net2Net's goal, arXiv 1511.05641, by the shorter
    way): the output stays, and the first gradient step can use them. `extend` applies the templates to other tensors of
    the same parameters.
    """
    templates = {
        name: _template(spec, sizes, group, tensors[name].shape, generator)
        for name, spec in specs.items()
        if group in spec.axes
    }
    return extend(templates, tensors), templates


def extend(templates: Tensors, tensors: Tensors) -> Tensors:
    """`tensors` in the leading corners of copies of the templates; without a template a tensor stays."""
    grown = dict(tensors)
    for name, template in templates.items():
        if name in tensors:
            grown[name] = template.clone()
            grown[name][tuple(slice(size) for size in tensors[name].shape)] = tensors[name]
    return grown


def shrink(specs: Specs, tensors: Tensors, group: str, kept: Tensor) -> Tensors:
    """`tensors` with only the `kept` units of `group`; the statistics of a layer norm count all that are left."""
    shrunk = dict(tensors)
    for name, spec in specs.items():
        if group not in spec.axes or name not in tensors:
            continue
        for axis, axis_group in enumerate(spec.axes):
            if axis_group == group:
                shrunk[name] = shrunk[name].index_select(axis, kept)
        if not spec.trained:
            shrunk[name] = torch.ones_like(shrunk[name])
    return shrunk


def importance(specs: Specs, tensors: Tensors, group: str) -> Tensor | float:
    """How strongly each unit of `group` is read: the sum of the magnitudes of its outgoing weights [N]."""
    total: Tensor | float = 0.0
    for name, spec in specs.items():
        for axis in range(len(spec.axes) - 1):
            if spec.axes[axis] == group:
                total = total + tensors[name].abs().movedim(axis, 0).flatten(1).sum(1)
    return total


def _template(
    spec: ParameterSpec, sizes: Mapping[str, int], group: str, old: torch.Size, generator: torch.Generator
) -> Tensor:
    shape = spec.shape(sizes)
    template = filled(spec.newborn or spec.fill, shape, math.prod(shape[:-1]), generator)
    for axis in range(len(spec.axes) - 1):
        if spec.axes[axis] == group:
            template.narrow(axis, old[axis], shape[axis] - old[axis]).zero_()
    return template
