"""Resize one agent's module. Growth preserves the function that the network computes.

A module's tensors are grouped by `roles`: `parameters`, `buffers` (not trained), and for each trained parameter its
`target` copy and Adam's first and second moments, `mean` and `square`.

New weights of a trained agent start with a `mean` of zero and the average `square` of comparable older weights. Adam's
bias correction counts the agent's updates, so weights whose `square` started at zero would step by 3 to 6.5 times the
learning rate in their first ten updates. Where a first layer grew from 64 to 96 units after 2,000 updates, the first
update changed Q by 0.0166 on average, compared with 0.0032 without growth. With the average `square` it is 0.0038; with
an update count per weight it would be 0.0074.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evorl.networks.parameters import ParameterSpec, Specs
from evorl.types import Roles, Tensors

MOMENTS = ("mean", "square")


def fresh_roles(specs: Specs, values: Tensors) -> Roles:
    """Return the roles for new `values`: targets equal to the parameters, zero moments."""
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


def newborn_square(value: Tensor, older: Sequence[Tensor], copies: int | None) -> Tensor:
    """Return Adam's second moment for a new parameter `value`: per copy, the mean over `older` weights.

    Copies are averaged separately because policy and value gradients differ by orders of magnitude. An agent that was
    never updated has zeros there, and so have its new weights.
    """
    means = torch.cat([square.reshape(copies or 1, -1) for square in older], 1).mean(1)
    return means.view(-1, *(1 for _ in value.shape[1:])).expand_as(value).clone()


def added_squares(added: Specs, specs: Specs, roles: Roles) -> Tensors:
    """Return the second moments of entirely new parameters `added` to those of `specs`.

    Weights take the mean over weights that produce the same units; biases and scales take that over biases and scales.
    """
    return {
        name: newborn_square(
            roles["parameters"][name],
            [
                roles["square"][other]
                for other, old in specs.items()
                if old.trained and old.produces == new.produces and (old.reads == (1,)) == (new.reads == (1,))
            ],
            new.copies,
        )
        for name, new in added.items()
        if new.trained
    }


def grow(specs: Specs, sizes: Mapping[str, int], roles: Roles, group: str, generator: torch.Generator) -> Roles:
    """Return `roles` with `group` widened to its entry in `sizes`.

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
        "mean": {name: torch.zeros_like(template) for name, template in templates.items()},
        "square": {
            name: newborn_square(template, [roles["square"][name]], specs[name].copies)
            for name, template in templates.items()
            if specs[name].trained
        },
    }
    return {role: _extended(moments.get(role, templates), tensors) for role, tensors in roles.items()}


def shrink(specs: Specs, roles: Roles, group: str, kept: Tensor) -> Roles:
    """Return `roles` with only the `kept` units of `group`; layer norm statistics then include all remaining units."""
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
    """Return the importance [N] of each unit of `group`: the sum of absolute outgoing weights."""
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
    """Return a grown parameter with the new units' values; the caller overwrites the leading corner with old values."""
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
