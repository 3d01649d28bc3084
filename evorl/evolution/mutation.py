"""Mutation operators: functions that change one child agent. They have no agent axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from evorl.config import Evolution
from evorl.config.fields import HyperparameterRange
from evorl.evolution.architecture import Networks, mutate_layers, mutate_units
from evorl.types import Agent, Change, Mutation


@dataclass(frozen=True)
class Context:
    """What a mutation may read besides the agent."""

    settings: Evolution
    networks: Networks


Mutate = Callable[[Agent, Context, np.random.Generator], Change | None]
"""Mutates the agent in place and returns the change, or None if there is nothing it could change."""


def no_mutation(agent: Agent, context: Context, rng: np.random.Generator) -> Change | None:
    """Leave the child identical to its parent."""
    return Change()


def mutate_architecture(agent: Agent, context: Context, rng: np.random.Generator) -> Change | None:
    """Add or remove a layer of one network with probability `new_layer`, else resize a layer."""
    limits = context.settings.architecture
    if rng.random() < context.settings.mutation.new_layer:
        return mutate_layers(agent, context.networks, limits, rng)
    return mutate_units(agent, context.networks, limits, rng)


def mutate_parameters(agent: Agent, context: Context, rng: np.random.Generator) -> Change | None:
    """Add Gaussian noise to every weight, with a standard deviation of `strength` times the weight's magnitude."""
    strength = context.settings.mutation.strength
    add_noise(agent, context.networks, strength, rng)
    return Change("noise", None, strength)


def add_noise(agent: Agent, networks: Networks, strength: float, rng: np.random.Generator) -> None:
    """Add Gaussian noise to every weight w of these networks, with a standard deviation of `strength` * |w|."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    for network in networks:
        parameters = agent.tensors[network]["parameters"]
        for name, value in parameters.items():
            parameters[name] = value + strength * value.abs() * torch.randn(value.shape, generator=generator)


def mutate_activation(agent: Agent, context: Context, rng: np.random.Generator) -> Change | None:
    """Change the activation to one shared by all hidden layers of all networks that have one."""
    shapes = {name: shape for name, shape in agent.architectures.items() if shape.activation is not None}
    before = sorted({str(shape.activation) for shape in shapes.values()})
    others = [name for name in context.settings.architecture.activations if [name] != before]
    if not shapes or not others:
        return None
    after = str(rng.choice(others))
    agent.architectures |= {name: replace(shape, activation=after) for name, shape in shapes.items()}
    return Change("activation", ", ".join(before), after)


def mutate_hyperparameter(agent: Agent, context: Context, rng: np.random.Generator) -> Change | None:
    """Perturb one hyperparameter up or down within its range, or resample it; at a bound, perturb it the other way."""
    ranges = context.settings.hyperparameters
    if not ranges:
        return None
    name = str(rng.choice(list(ranges)))
    before = agent.hyperparameters[name]
    if ranges[name].resample and rng.random() < ranges[name].resample:
        agent.hyperparameters[name] = ranges[name].at(rng.random())
        return Change(name, before, agent.hyperparameters[name])
    up, down = (perturbed(before, ranges[name], factor) for factor in ranges[name].factors)
    first, second = (up, down) if rng.random() < 0.5 else (down, up)
    agent.hyperparameters[name] = second if first == before else first
    return Change(name, before, agent.hyperparameters[name])


def perturbed(value: float, range: HyperparameterRange, factor: float) -> float:
    """Return `value` perturbed by `factor` on the range's scale and clipped to the range.

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
    change = MUTATIONS[kind](agent, context, rng)
    if change is None:
        agent.mutation = Mutation("none", kind, after="nothing to change")
    else:
        agent.mutation = Mutation(kind, *change)
