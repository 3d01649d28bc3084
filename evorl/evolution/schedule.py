"""Scheduled mutations, which repeat those of an agent's lineage in place of random ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from evorl.config import ScheduledMutation
from evorl.evolution.mutation import (
    DEPTH,
    MERGED,
    Context,
    add_layer,
    add_noise,
    enlarge,
    merge_layer,
    reduce,
    remove_residual_layer,
    reset_dormant,
    set_activation,
)
from evorl.types import MIGRATION, Agent, Mutation, UserError

Redo = Callable[[Agent, ScheduledMutation, Context, np.random.Generator], None]
"""Applies the recorded mutation to the agent in place."""


def follow(agent: Agent, context: Context, generation: int, id: int, rng: np.random.Generator) -> Agent:
    """Make a child with the mutations scheduled after `generation`; if there are none, return the agent itself.

    Raises UserError if a mutation does not fit the agent.
    """
    assert context.settings.schedule is not None
    due = [mutation for mutation in context.settings.schedule.mutations if mutation.generation == generation]
    if not due:
        return agent
    child = agent.child(id, generation)
    for one in due:
        what = f"{one.kind} of {one.target!r} after generation {generation}"
        if one.kind not in REDO:
            raise UserError(f"evolution.schedule: {what} does not fit: mutations of this kind cannot be repeated")
        try:
            REDO[one.kind](child, one, context, rng)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"evolution.schedule: {what} does not fit the agent: {error!r}") from error
        child.mutation = Mutation(one.kind, one.target, one.before, one.after)
    if len({one.target for one in due}) > 1 and all(one.kind == "hyperparameters" for one in due):
        # A record names one setting; several changes, as by a strategy or a migration, are recorded as a migration.
        child.mutation = Mutation(MIGRATION, "hyperparameters")
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
    set_activation(agent, str(record.after))


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


def _dormant(agent: Agent, record: ScheduledMutation, context: Context, rng: np.random.Generator) -> None:
    # Reset this agent's own dormant units, if any; they may differ from the recorded ones.
    reset_dormant(agent, context.networks, context.settings.mutation.dormant_threshold, rng)


REDO: Mapping[str, Redo] = {
    "none": _nothing,
    "hyperparameters": _hyperparameter,
    "parameters": _noise,
    "activation": _activation,
    "architecture": _architecture,
    "dormant": _dormant,
}
