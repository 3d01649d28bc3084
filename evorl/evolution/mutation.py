"""Mutation operators: functions that change one agent's hyperparameters, parameters or architecture.

An architecture mutation is one change, adding or removing one layer or some units, drawn from all that the limits allow
in any of the agent's networks. Growth is function-preserving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from evorl.config import ArchitectureLimits, Evolution
from evorl.config.fields import HyperparameterRange
from evorl.networks import ACTIVATIONS
from evorl.networks.parameters import (
    added_exp_avg_sq,
    fresh_roles,
    grow,
    importance,
    initialise,
    joined,
    shrink,
)
from evorl.networks.stack import NetworkSpec
from evorl.types.agents import EXP_AVG_SQ, Agent, Architecture, Mutation

Networks = Mapping[str, NetworkSpec]
UNIT_STEPS, CHANNEL_STEPS = (16, 32), (8, 16)
"""The numbers of units of a layer or a recurrent cell, and of channels of a convolution, that one mutation adds or
removes."""
MIN_CHANNELS, MAX_CHANNELS = 8, 128
"""The range of the channels of a convolution that mutations change."""
MAX_CONVOLUTIONS = 6
"""The maximum number of convolutional layers that mutations may reach."""
DEPTH = ".residual_layers"
"""Ends the target of a mutation that adds or removes a residual layer after a layer."""


def mutate_layers(
    agent: Agent, networks: Networks, limits: ArchitectureLimits, rng: np.random.Generator
) -> Mutation | None:
    """Add or remove one residual layer of one network; return None if the limits allow neither."""
    choices: list[Callable[[], Mutation]] = []
    for name in networks:
        shape = agent.architectures[name]
        hidden = {f"hidden.{index}": depth for index, depth in enumerate(shape.residual_layers)}
        images = {f"channels.{index}": layer.residual_layers for index, layer in enumerate(shape.convolutions)}
        for depths, most in ((hidden, limits.max_layers), (images, MAX_CONVOLUTIONS)):
            residual = [group for group, depth in depths.items() if depth]
            if depths and len(depths) + sum(depths.values()) < most:
                choices.append(partial(add_layer, agent, networks, name, str(rng.choice(list(depths))), rng))
            if residual:
                choices.append(partial(remove_residual_layer, agent, networks, name, str(rng.choice(residual))))
    return choices[rng.integers(len(choices))]() if choices else None


def mutate_units(
    agent: Agent, networks: Networks, limits: ArchitectureLimits, rng: np.random.Generator
) -> Mutation | None:
    """Resize a layer or a recurrent cell of one network; return None if the limits allow nothing."""
    choices: list[Callable[[], Mutation]] = []
    units, channels = int(rng.choice(UNIT_STEPS)), int(rng.choice(CHANNEL_STEPS))
    groups = [(name, *group) for name in networks for group in agent.architectures[name].sizes().items()]
    for name, group, size in groups:
        step, (least, most) = channels if _of_channels(group) else units, _bounds(group, limits)
        more, fewer = min(size + step, most), max(size - step, least)
        if more > size:
            choices.append(partial(enlarge, agent, networks, name, group, more, rng))
        if fewer < size:
            choices.append(partial(reduce, agent, networks, name, group, fewer))
    return choices[rng.integers(len(choices))]() if choices else None


def enlarge(agent: Agent, networks: Networks, name: str, group: str, size: int, rng: np.random.Generator) -> Mutation:
    """Widen a layer of network `name`. Nothing reads the new units yet, so the function is preserved."""
    old = agent.architectures[name]
    new = agent.architectures[name] = old.resized(group, size)
    specs = networks[name].network.specs(new)
    agent.tensors[name] = grow(specs, new.sizes(), agent.tensors[name], group, _torch_generator(rng))
    return Mutation("architecture", f"{_of(name, networks)}{group}", old.sizes()[group], size)


def reduce(agent: Agent, networks: Networks, name: str, group: str, size: int) -> Mutation:
    """Narrow a layer, dropping the units with the smallest outgoing weights."""
    old = agent.architectures[name]
    specs = networks[name].network.specs(old)
    read = importance(specs, agent.tensors[name]["parameters"], group)
    units = read.argsort(descending=True, stable=True)[:size].sort().values
    agent.tensors[name] = shrink(specs, agent.tensors[name], group, units)
    agent.architectures[name] = old.resized(group, size)
    return Mutation("architecture", f"{_of(name, networks)}{group}", old.sizes()[group], size)


def add_layer(agent: Agent, networks: Networks, name: str, group: str, rng: np.random.Generator) -> Mutation:
    """Add a residual layer after the layer of `group`. Its scale is zero, so the function is preserved."""
    network, old = networks[name].network, agent.architectures[name]
    new = agent.architectures[name] = old.deepened(group, +1)
    before, specs = network.specs(old), network.specs(new)
    added = {key: spec for key, spec in specs.items() if key not in before}
    values = initialise(added, new.sizes(), _torch_generator(rng))
    roles = joined(agent.tensors[name], fresh_roles(added, values))
    roles[EXP_AVG_SQ] |= added_exp_avg_sq(added, before, roles)
    agent.tensors[name] = roles
    return _depth(agent, networks, name, group, +1)


def remove_residual_layer(agent: Agent, networks: Networks, name: str, group: str) -> Mutation:
    """Remove the last residual layer after the layer of `group`."""
    new = agent.architectures[name] = agent.architectures[name].deepened(group, -1)
    left = networks[name].network.specs(new)
    agent.tensors[name] = {
        role: {key: value for key, value in tensors.items() if key in left}
        for role, tensors in agent.tensors[name].items()
    }
    return _depth(agent, networks, name, group, -1)


def _depth(agent: Agent, networks: Networks, name: str, group: str, change: int) -> Mutation:
    """Record that `change` residual layers were added after the layer of `group` (removed if negative)."""
    after = agent.architectures[name].depth(group)
    return Mutation("architecture", f"{_of(name, networks)}{group}{DEPTH}", after - change, after)


def _of(name: str, networks: Networks) -> str:
    """Prefix of a target that names the network; empty if the agent has only one."""
    return f"{name}." if len(networks) > 1 else ""


def _torch_generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


def sample_hyperparameters(ranges: Mapping[str, HyperparameterRange], rng: np.random.Generator) -> dict[str, float]:
    """Draw the hyperparameters that have a range, uniformly on the range's scale."""
    return {name: range.at(rng.random()) for name, range in ranges.items()}


def sample_sizes(shape: Architecture, limits: ArchitectureLimits, rng: np.random.Generator) -> Architecture:
    """Draw units and channels log-uniformly within the limits, for the same number of layers."""
    for group in shape.sizes():
        low, high = _bounds(group, limits)
        size = round(low * (high / low) ** rng.random())
        shape = shape.resized(group, min(max(size, low), high))
    return shape


def _of_channels(group: str) -> bool:
    return group.startswith("channels.")


def _bounds(group: str, limits: ArchitectureLimits) -> tuple[int, int]:
    """The least and the largest size of a group of units or channels."""
    return (MIN_CHANNELS, MAX_CHANNELS) if _of_channels(group) else (limits.min_units, limits.max_units)


@dataclass(frozen=True)
class Context:
    """The settings and networks that a mutation may read besides the agent."""

    settings: Evolution
    networks: Networks


Mutate = Callable[[Agent, Context, np.random.Generator], Mutation | None]
"""Mutates the agent in place and returns a record of the change, or None if nothing can be changed."""


def no_mutation(agent: Agent, context: Context, rng: np.random.Generator) -> Mutation | None:
    """Leave the child identical to its parent."""
    return Mutation("none")


def mutate_architecture(agent: Agent, context: Context, rng: np.random.Generator) -> Mutation | None:
    """Add or remove a layer of one network with probability `new_layer` where the limits allow it; else resize one."""
    limits = context.settings.architecture
    mutation = None
    if rng.random() < context.settings.mutation.new_layer:
        mutation = mutate_layers(agent, context.networks, limits, rng)
    return mutation or mutate_units(agent, context.networks, limits, rng)


def mutate_parameters(agent: Agent, context: Context, rng: np.random.Generator) -> Mutation | None:
    """Add Gaussian noise to every weight, with a standard deviation of `strength` times the weight's magnitude."""
    strength, generator = context.settings.mutation.strength, _torch_generator(rng)
    for network in context.networks:
        parameters = agent.tensors[network]["parameters"]
        for name, value in parameters.items():
            parameters[name] = value + strength * value.abs() * torch.randn(value.shape, generator=generator)
    return Mutation("parameters", "noise", None, strength)


def mutate_activation(agent: Agent, context: Context, rng: np.random.Generator) -> Mutation | None:
    """Change the activation to one shared by all hidden layers of all networks that have one."""
    before = sorted({shape.activation for shape in agent.architectures.values() if shape.activation is not None})
    others = [name for name in ACTIVATIONS if [name] != before]
    if not before or not others:
        return None
    after = str(rng.choice(others))
    agent.architectures |= {
        network: replace(shape, activation=after)
        for network, shape in agent.architectures.items()
        if shape.activation is not None
    }
    return Mutation("activation", "activation", ", ".join(before), after)


def mutate_hyperparameter(agent: Agent, context: Context, rng: np.random.Generator) -> Mutation | None:
    """Perturb one hyperparameter up or down within its range, or resample it; at a bound, perturb it the other way."""
    ranges = context.settings.hyperparameters
    if not ranges:
        return None
    name = str(rng.choice(list(ranges)))
    before = agent.hyperparameters[name]
    if ranges[name].resample and rng.random() < ranges[name].resample:
        agent.hyperparameters[name] = ranges[name].at(rng.random())
        return Mutation("hyperparameters", name, before, agent.hyperparameters[name])
    up, down = (perturbed(before, ranges[name], factor) for factor in ranges[name].factors)
    first, second = (up, down) if rng.random() < 0.5 else (down, up)
    agent.hyperparameters[name] = second if first == before else first
    return Mutation("hyperparameters", name, before, agent.hyperparameters[name])


def perturbed(value: float, range: HyperparameterRange, factor: float) -> float:
    """Perturb `value` by `factor` on the range's scale and clip it to the range (arXiv 1711.09846).

    The value stays continuous, so that rounding never pins an integer setting. A value near one, such as a discount, is
    perturbed in its distance from one: on a log scale, 0.99 would forever jump between the ends of its range.
    """
    if range.scale == "linear":
        moved = value + (factor - 1) * (range.max - range.min)
    elif range.scale == "one_minus_log":
        moved = 1 - (1 - value) / factor
    else:
        moved = value * factor
    return float(min(max(moved, range.min), range.max))


MUTATIONS: Mapping[str, Mutate] = {
    "none": no_mutation,
    "architecture": mutate_architecture,
    "parameters": mutate_parameters,
    "activation": mutate_activation,
    "hyperparameters": mutate_hyperparameter,
}


def mutate(agent: Agent, context: Context, rng: np.random.Generator) -> None:
    """Apply one kind of mutation, sampled by the configured weights, and record it in `agent.mutation`."""
    weights = context.settings.mutation.weights()
    total = sum(weights.values())
    kind = str(rng.choice(list(weights), p=[weight / total for weight in weights.values()]))
    mutation = MUTATIONS[kind](agent, context, rng)
    agent.mutation = mutation or Mutation("none", kind, after="nothing to change")
