"""Selection operators, pure functions of the fitness and a random generator, and the step to the next generation.

The mutations of a recorded schedule can take the place of random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config import ScheduledMutation, Selection
from evorl.evolution.mutation import (
    MERGED,
    Context,
    add_layer,
    add_noise,
    enlarge,
    merge_layer,
    mutate,
    reduce,
    remove_residual_layer,
    reset_dormant,
)
from evorl.types import RESTORED, Agent, Mutation, UserError

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


def _dormant(agent: Agent, record: ScheduledMutation, context: Context, rng: np.random.Generator) -> None:
    # This agent's own dormant units, which may be others than the recorded ones, or none.
    reset_dormant(agent, context.networks, context.settings.mutation.dormant_threshold, rng)


REDO: Mapping[str, Redo] = {
    "none": _nothing,
    "hyperparameters": _hyperparameter,
    "parameters": _noise,
    "activation": _activation,
    "architecture": _architecture,
    "dormant": _dormant,
}


class Offspring(NamedTuple):
    """A place in the next generation: the candidate that fills it, as a child that may mutate or as itself."""

    parent: int
    child: bool


Select = Callable[[NDArray[np.float64], int, Selection, np.random.Generator], list[Offspring]]
"""Fills the places of the next generation, given the candidates' fitness, how many of them are `archived`, the settings
and a generator. Archived candidates come first; they serve as parents and do not count towards the population size."""


def tournament(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Tournament selection: keep the elite if `elitism` is set, and fill the other places with winners' children.

    The best of `size` candidates sampled without replacement wins (Miller & Goldberg 1995).
    """
    places = [Offspring(elite(fitness), child=False)] if settings.elitism else []
    while len(places) < len(fitness) - archived:
        entrants = np.sort(rng.choice(len(fitness), size=settings.size, replace=False))
        places.append(Offspring(int(entrants[elite(fitness[entrants])]), child=True))
    return places


def truncation(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Replace the worst `share` with children of as many of the best (population-based training, arXiv 1711.09846).

    All others survive as themselves. In a population of two or more, at least one agent is replaced.
    """
    size = len(fitness) - archived
    count = min(max(1, round(settings.share * size)), size // 2)
    best_first = np.lexsort((-np.arange(len(fitness)), -_ranked(fitness)))
    population = best_first[best_first >= archived]
    survivors = [Offspring(int(index), child=False) for index in population[: size - count]]
    return survivors + [Offspring(int(rng.choice(best_first[: max(1, count)])), child=True) for _ in range(count)]


def elite(fitness: NDArray[np.float64]) -> int:
    """Index of the best candidate; ties go to the last, which is the newest."""
    ranked = _ranked(fitness)
    return int(len(ranked) - 1 - np.argmax(ranked[::-1]))


def _ranked(fitness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace NaN by -inf, so that agents without a fitness rank last."""
    return np.where(np.isnan(fitness), -np.inf, fitness)


def no_selection(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Keep every agent of the population as itself."""
    return [Offspring(place, child=False) for place in range(archived, len(fitness))]


SELECTIONS: Mapping[str, Select] = {"tournament": tournament, "truncation": truncation, "none": no_selection}


def evolve(
    agents: Sequence[Agent],
    context: Context,
    next_id: int,
    rng: np.random.Generator,
    archive: Sequence[Agent] = (),
    generation: int = 1,
    archived: int | None = None,
) -> list[Agent]:
    """Select by fitness and mutate the children if that is due after `generation`, or follow a schedule.

    Ids of new agents count up from `next_id`. Each child records its parent's generation, which is `archived` for
    parents from the archive.

    Agents of the `archive` compete as parents. One that survives as itself becomes a child without mutation, since an
    agent with its id may have trained on. An agent with a fault never survives: a child of the elite takes its place. A
    population of one trains on without selection and mutation: nothing would tell whether a mutation made it better,
    and the archive would reset it to its own past.
    """
    if context.settings.schedule is not None:
        return [follow(agent, context, generation, next_id + place, rng) for place, agent in enumerate(agents)]
    candidates = [*archive, *agents]
    fitness = np.array([np.nan if agent.fitness is None else agent.fitness for agent in candidates])
    selection = context.settings.selection
    evolved = []
    name = selection.name if context.settings.is_due(generation) and len(agents) > 1 else "none"
    for offspring in SELECTIONS[name](fitness, len(archive), selection, rng):
        if candidates[offspring.parent].fault:
            offspring = Offspring(elite(fitness), child=True)
        agent = candidates[offspring.parent]
        if offspring.child or offspring.parent < len(archive):
            agent = agent.child(next_id, archived if offspring.parent < len(archive) else generation)
            next_id += 1
            if offspring.child:
                mutate(agent, context, rng)
            else:
                agent.mutation = RESTORED
        evolved.append(agent)
    return evolved
