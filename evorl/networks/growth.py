"""Change the shapes of one agent's module. Growth leaves the function that the network computes as it was.

A module's tensors are `roles`: `parameters`, `buffers` (not trained), and per trained parameter its `target` copy and
Adam's `mean` and `square`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from evorl.networks.parameters import ParameterSpec, Specs
from evorl.types import Roles, Tensors

MOMENTS = ("mean", "square")


def fresh_roles(specs: Specs, values: Tensors) -> Roles:
    """The roles of new `values`: targets equal to the parameters, moments of zero."""
    parameters = {name: value for name, value in values.items() if specs[name].trained}
    return {
        "parameters": parameters,
        "buffers": {name: value for name, value in values.items() if not specs[name].trained},
        "target": {name: value.clone() for name, value in parameters.items()},
        **{role: {name: torch.zeros_like(value) for name, value in parameters.items()} for role in MOMENTS},
    }


def joined(roles: Roles, more: Roles) -> Roles:
    """Both sets of tensors, role by role."""
    return {role: tensors | more[role] for role, tensors in roles.items()}


def grow(specs: Specs, sizes: Mapping[str, int], roles: Roles, group: str, generator: torch.Generator) -> Roles:
    """`roles` with `group` as wide as `sizes` says.

    New units read with fresh weights and are read with zero weights (Net2Net's goal, arXiv 1511.05641, by a shorter
    way): the output stays, and the first gradient step can use them.
    """
    templates = {
        name: _template(spec, sizes, group, tensors[name].shape, generator)
        for name, spec in specs.items()
        if group in spec.axes
        for tensors in (roles["parameters"] if spec.trained else roles["buffers"],)
    }
    zeros = {name: torch.zeros_like(template) for name, template in templates.items()}
    return {role: _extended(zeros if role in MOMENTS else templates, tensors) for role, tensors in roles.items()}


def shrink(specs: Specs, roles: Roles, group: str, kept: Tensor) -> Roles:
    """`roles` with only the `kept` units of `group`; the statistics of a layer norm then count all that are left."""
    shrunk = {role: dict(tensors) for role, tensors in roles.items()}
    for tensors in shrunk.values():
        for name in tensors:
            for axis, axis_group in enumerate(specs[name].axes):
                if axis_group == group:
                    tensors[name] = tensors[name].index_select(axis, kept)
    for name, values in shrunk["buffers"].items():
        if group in specs[name].axes:
            values.fill_(1.0)
    return shrunk


def importance(specs: Specs, parameters: Tensors, group: str) -> Tensor:
    """How strongly each unit of `group` is read: the sum of the magnitudes of its outgoing weights [N]."""
    read = [
        parameters[name].abs().movedim(axis, 0).flatten(1).sum(1)
        for name, spec in specs.items()
        if spec.trained
        for axis in spec.axes_read(group)
    ]
    return torch.stack(read).sum(0)


def _template(
    spec: ParameterSpec, sizes: Mapping[str, int], group: str, old: torch.Size, generator: torch.Generator
) -> Tensor:
    """The grown parameter with the values of the new units; the old ones are written over the leading corner."""
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
