"""Mutations of an agent's shapes: one layer or some units more or less. Growth leaves what the agent does as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from evorl.config import ArchitectureLimits
from evorl.networks.growth import added_squares, fresh_roles, grow, importance, joined, newborn_square, shrink
from evorl.networks.parameters import initialise
from evorl.networks.spec import NetworkSpec
from evorl.types import Agent

Networks = Mapping[str, NetworkSpec]


def mutate_layers(agent: Agent, networks: Networks, limits: ArchitectureLimits, rng: np.random.Generator) -> str | None:
    """Add a layer or remove one, hidden or convolutional; None where the limits allow neither."""
    architecture = agent.architecture
    hidden = {f"hidden.{index}": depth for index, depth in enumerate(architecture.residual_layers)}
    images = {f"channels.{index}": layer.residual_layers for index, layer in enumerate(architecture.convolutions)}
    choices: list[Callable[[], str]] = []
    for depths, fewest, most in ((hidden, limits.min_layers, limits.max_layers), (images, 0, limits.max_convolutions)):
        count, residual = len(depths) + sum(depths.values()), [group for group, depth in depths.items() if depth]
        if depths and count < most:
            choices.append(partial(add_layer, agent, networks, str(rng.choice(list(depths))), rng))
        if residual and count > fewest:
            choices.append(partial(remove_residual_layer, agent, networks, str(rng.choice(residual))))
        elif depths is hidden and len(hidden) > 1 and count > fewest:
            choices.append(partial(merge_layer, agent, networks, int(rng.integers(len(hidden) - 1))))
    return choices[rng.integers(len(choices))]() if choices else None


def mutate_units(agent: Agent, networks: Networks, limits: ArchitectureLimits, rng: np.random.Generator) -> str | None:
    """Make a layer, a recurrent cell or a kernel larger or smaller; None where the limits allow neither."""
    choices: list[Callable[[], str]] = []
    rules = {
        "hidden": (int(rng.choice(limits.unit_steps)), limits.min_units, limits.max_units),
        "channels": (int(rng.choice(limits.channel_steps)), limits.min_channels, limits.max_channels),
        "kernel": (1, 1, limits.max_kernel),
    }
    rules["recurrent"] = rules["hidden"]
    for group, size in agent.architecture.sizes().items():
        step, least, most = rules[group.split(".")[0]]
        more, fewer = min(size + step, most), max(size - step, least)
        if more > size:
            choices.append(partial(enlarge, agent, networks, group, more, rng))
        if fewer < size:
            choices.append(partial(reduce, agent, networks, group, fewer))
    return choices[rng.integers(len(choices))]() if choices else None


def enlarge(agent: Agent, networks: Networks, group: str, size: int, rng: np.random.Generator) -> str:
    """Widen a layer or a kernel. Nothing reads the new units yet, so the agent acts as before."""
    before = agent.architecture.sizes()[group]
    agent.architecture = agent.architecture.resized(group, size)
    sizes = agent.architecture.sizes()
    for module, spec in networks.items():
        specs = spec.network.specs(agent.architecture)
        agent.tensors[module] = grow(specs, sizes, agent.tensors[module], group, _torch_generator(rng))
    return f"{group}: {before} -> {size}"


def reduce(agent: Agent, networks: Networks, group: str, size: int) -> str:
    """Narrow a layer by the units that are read least, or a kernel by its last rows and columns."""
    before = agent.architecture.sizes()[group]
    specs = {module: spec.network.specs(agent.architecture) for module, spec in networks.items()}
    if group.startswith("kernel."):
        kept = torch.arange(size)
    else:
        read = [importance(specs[module], agent.tensors[module]["parameters"], group) for module in networks]
        kept = torch.stack(read).sum(0).argsort(descending=True, stable=True)[:size].sort().values
    for module in networks:
        agent.tensors[module] = shrink(specs[module], agent.tensors[module], group, kept)
    agent.architecture = agent.architecture.resized(group, size)
    return f"{group}: {before} -> {size}"


def add_layer(agent: Agent, networks: Networks, group: str, rng: np.random.Generator) -> str:
    """Add a residual layer after the layer of `group`. Its scale is zero, so the agent acts as before."""
    old, agent.architecture = agent.architecture, agent.architecture.deepened(group, +1)
    for module, spec in networks.items():
        before, specs = spec.network.specs(old), spec.network.specs(agent.architecture)
        added = {name: spec for name, spec in specs.items() if name not in before}
        values = initialise(added, agent.architecture.sizes(), _torch_generator(rng))
        roles = joined(agent.tensors[module], fresh_roles(added, values))
        roles["square"] |= added_squares(added, before, roles)
        agent.tensors[module] = roles
    return f"{group}: layer added"


def remove_residual_layer(agent: Agent, networks: Networks, group: str) -> str:
    """Remove the last residual layer after the layer of `group`."""
    agent.architecture = agent.architecture.deepened(group, -1)
    for module, spec in networks.items():
        left = spec.network.specs(agent.architecture)
        agent.tensors[module] = {
            role: {name: value for name, value in tensors.items() if name in left}
            for role, tensors in agent.tensors[module].items()
        }
    return f"{group}: layer removed"


def merge_layer(agent: Agent, networks: Networks, index: int) -> str:
    """Remove hidden layer `index`, not the last: the next one takes over the product of both.

    What the agent loses is the activation between them. Moments of the product start as those of all new weights do,
    with the mean square of the next layer, which passed on the same gradient.
    """
    old = agent.architecture
    for module, spec in networks.items():
        specs = spec.network.specs(old)
        for role, tensors in agent.tensors[module].items():
            left, merged = spec.network.without_layer(old, index, tensors)
            for name, next_name in merged.items():
                if role == "mean":
                    left[name] = torch.zeros_like(left[name])
                elif role == "square":
                    left[name] = newborn_square(left[name], [tensors[next_name]], specs[next_name].copies)
            agent.tensors[module][role] = left
    agent.architecture = replace(
        old,
        hidden_sizes=old.hidden_sizes[:index] + old.hidden_sizes[index + 1 :],
        residual_layers=old.residual_layers[:index] + old.residual_layers[index + 1 :],
    )
    return f"hidden.{index}: layer merged into the next"


def _torch_generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**62)))
