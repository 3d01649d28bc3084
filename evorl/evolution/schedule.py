"""Scheduled mutations: replay the recorded mutations of one agent's lineage on another agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from evorl.config import ScheduledMutation
from evorl.evolution.mutation import (
    MERGED,
    Context,
    add_layer,
    add_noise,
    enlarge,
    merge_layer,
    reduce,
    remove_residual_layer,
)
from evorl.types import Agent, Mutation, UserError

Redo = Callable[[Agent, ScheduledMutation, Context, np.random.Generator], None]
"""Applies the recorded mutation to the agent in place."""
DEPTH = ".residual_layers"


def follow(agent: Agent, context: Context, generation: int, id: int, rng: np.random.Generator) -> Agent:
    """Make a child with the mutations scheduled after `generation`; without any, the agent goes on.

    Raises UserError if a mutation does not fit the agent.
    """
    assert context.settings.schedule is not None
    due = [mutation for mutation in context.settings.schedule.mutations if mutation.generation == generation]
    if not due:
        return agent
    child = agent.child(id, generation)
    for one in due:
        try:
            REDO[one.kind](child, one, context, rng)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            what = f"{one.kind} of {one.target!r} after generation {generation}"
            raise UserError(f"evolution.schedule: {what} does not fit the agent: {error!r}") from error
        child.mutation = Mutation(one.kind, one.target, one.before, one.after)
    return child


def _nothing(agent: Agent, record: ScheduledMutation, context: Context, rng: np.random.Generator) -> None:
    return None


def _hyperparameter(agent: Agent, record: ScheduledMutation, context: Context, rng: np.random.Generator) -> None:
    if record.target not in agent.hyperparameters:
        raise KeyError(record.target)
    agent.hyperparameters[record.target] = float(record.after)  # type: ignore[arg-type]


def _noise(agent: Agent, record: ScheduledMutation, context: Context, rng: np.random.Generator) -> None:
    add_noise(agent, context.networks, float(record.after), rng)  # type: ignore[arg-type]


def _activation(agent: Agent, record: ScheduledMutation, context: Context, rng: np.random.Generator) -> None:
    shapes = agent.architectures.items()
    agent.architectures |= {
        name: replace(shape, activation=str(record.after)) for name, shape in shapes if shape.activation is not None
    }


def _architecture(agent: Agent, record: ScheduledMutation, context: Context, rng: np.random.Generator) -> None:
    networks = context.networks
    name, group = record.target.split(".", 1) if len(networks) > 1 else (next(iter(networks)), record.target)
    if record.after == MERGED:
        merge_layer(agent, networks, name, int(group.removeprefix("hidden.")))
    elif group.endswith(DEPTH):
        if int(record.after) > int(record.before):  # type: ignore[arg-type]
            add_layer(agent, networks, name, group.removesuffix(DEPTH), rng)
        else:
            remove_residual_layer(agent, networks, name, group.removesuffix(DEPTH))
    elif (size := int(record.after)) > agent.architectures[name].sizes()[group]:  # type: ignore[arg-type]
        enlarge(agent, networks, name, group, size, rng)
    else:
        reduce(agent, networks, name, group, size)


REDO: Mapping[str, Redo] = {
    "none": _nothing,
    "hyperparameters": _hyperparameter,
    "parameters": _noise,
    "activation": _activation,
    "architecture": _architecture,
}
