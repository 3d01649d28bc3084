"""Mutations of an agent's shapes: one layer or some units more or less. Growth leaves what the agent does as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from evorl.config import ArchitectureLimits
from evorl.networks import Network
from evorl.networks.growth import MOMENTS, fresh_roles, grow, importance, joined, shrink
from evorl.networks.parameters import initialise
from evorl.types import Agent, Architecture

Networks = Mapping[str, Network]


def mutate_layers(agent: Agent, networks: Networks, limits: ArchitectureLimits, rng: np.random.Generator) -> str | None:
    """Add a layer or remove one; None where the limits allow neither."""
    architecture = agent.architecture
    count, hidden = architecture.layers, len(architecture.hidden_sizes)
    residual = [index for index, depth in enumerate(architecture.residual_layers) if depth]
    choices: list[Callable[[], str]] = []
    if hidden and count < limits.max_layers:
        choices.append(lambda: add_layer(agent, networks, int(rng.integers(hidden)), rng))
    if residual and count > limits.min_layers:
        choices.append(lambda: remove_residual_layer(agent, networks, int(rng.choice(residual))))
    elif hidden > 1 and count > limits.min_layers:
        choices.append(lambda: merge_layer(agent, networks, int(rng.integers(hidden - 1))))
    return choices[rng.integers(len(choices))]() if choices else None


def mutate_units(agent: Agent, networks: Networks, limits: ArchitectureLimits, rng: np.random.Generator) -> str | None:
    """Add units to a layer or remove some; None where the limits allow neither."""
    choices: list[Callable[[], str]] = []
    step = int(rng.choice(limits.unit_steps))
    for group, width in agent.architecture.sizes().items():
        more, fewer = min(width + step, limits.max_units), max(width - step, limits.min_units)
        if more > width:
            choices.append(partial(add_units, agent, networks, group, more, rng))
        if fewer < width:
            choices.append(partial(remove_units, agent, networks, group, fewer))
    return choices[rng.integers(len(choices))]() if choices else None


def add_units(agent: Agent, networks: Networks, group: str, width: int, rng: np.random.Generator) -> str:
    """Widen a layer. Nothing reads the new units yet, so the agent acts as before."""
    before = agent.architecture.sizes()[group]
    agent.architecture = agent.architecture.resized(group, width)
    sizes = agent.architecture.sizes()
    for module, network in networks.items():
        specs = network.specs(agent.architecture)
        agent.tensors[module] = grow(specs, sizes, agent.tensors[module], group, _torch_generator(rng))
    return f"{group}: {before} -> {width} units"


def remove_units(agent: Agent, networks: Networks, group: str, width: int) -> str:
    """Narrow a layer by the units that are read least."""
    before = agent.architecture.sizes()[group]
    specs = {module: network.specs(agent.architecture) for module, network in networks.items()}
    read = [importance(specs[module], agent.tensors[module]["parameters"], group) for module in networks]
    kept = torch.stack(read).sum(0).argsort(descending=True, stable=True)[:width].sort().values
    for module in networks:
        agent.tensors[module] = shrink(specs[module], agent.tensors[module], group, kept)
    agent.architecture = agent.architecture.resized(group, width)
    return f"{group}: {before} -> {width} units"


def add_layer(agent: Agent, networks: Networks, index: int, rng: np.random.Generator) -> str:
    """Add a residual layer after hidden layer `index`. Its scale is zero, so the agent acts as before."""
    old, agent.architecture = agent.architecture, _with_residual(agent, index, +1)
    for module, network in networks.items():
        specs = network.specs(agent.architecture)
        added = {name: spec for name, spec in specs.items() if name not in network.specs(old)}
        values = initialise(added, agent.architecture.sizes(), _torch_generator(rng))
        agent.tensors[module] = joined(agent.tensors[module], fresh_roles(added, values))
    return f"hidden.{index}: layer added"


def remove_residual_layer(agent: Agent, networks: Networks, index: int) -> str:
    """Remove the last residual layer after hidden layer `index`."""
    agent.architecture = _with_residual(agent, index, -1)
    for module, network in networks.items():
        left = network.specs(agent.architecture)
        agent.tensors[module] = {
            role: {name: value for name, value in tensors.items() if name in left}
            for role, tensors in agent.tensors[module].items()
        }
    return f"hidden.{index}: layer removed"


def merge_layer(agent: Agent, networks: Networks, index: int) -> str:
    """Remove hidden layer `index`, not the last: the next one takes over the product of both.

    What the agent loses is the activation between them; moments of the product start at zero.
    """
    old = agent.architecture
    for module, network in networks.items():
        for role, tensors in agent.tensors[module].items():
            left, merged = network.without_layer(old, index, tensors)
            if role in MOMENTS:
                left |= {name: torch.zeros_like(left[name]) for name in merged}
            agent.tensors[module][role] = left
    agent.architecture = replace(
        old,
        hidden_sizes=old.hidden_sizes[:index] + old.hidden_sizes[index + 1 :],
        residual_layers=old.residual_layers[:index] + old.residual_layers[index + 1 :],
    )
    return f"hidden.{index}: layer merged into the next"


def _with_residual(agent: Agent, index: int, change: int) -> Architecture:
    depths = list(agent.architecture.residual_layers)
    depths[index] += change
    return replace(agent.architecture, residual_layers=tuple(depths))


def _torch_generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**62)))
