"""Selection operators, pure functions of the fitness and a random generator, and the step to the next generation.

The mutations of a recorded schedule can take the place of random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config import Evolution, ScheduledMutation, Selection
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
)
from evorl.types import RESTORED, Agent, Mutation, UserError

Redo = Callable[[Agent, ScheduledMutation, Context, np.random.Generator], None]
"""Applies the recorded mutation to the agent in place."""
DEPTH = ".residual_layers"
TRUSTED_CORRELATION, LATEST_SHARE = 0.7, 1 / 3
"""When `burn_in: auto` ends: ranks of successive generations correlate by this, or this share of steps is spent."""


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
    """Tournament selection: replace the worst share `replace` of the population with children of tournament winners.

    The best of `size` candidates sampled without replacement wins (Miller & Goldberg 1995). Survivors keep their
    places, train on untouched, and are the candidates, together with the archive. If all agents are to be replaced,
    all compete, and only the elite survives, in the first place (with `elitism`): generational selection.
    """
    size, everyone = len(fitness) - archived, np.arange(len(fitness))
    count = max(1, round(settings.replace * size))

    def winner(candidates: NDArray[np.int64]) -> Offspring:
        entrants = np.sort(rng.choice(candidates, size=min(settings.size, len(candidates)), replace=False))
        return Offspring(int(entrants[elite(fitness[entrants])]), child=True)

    if count >= size:
        first = [Offspring(elite(fitness), child=False)] if settings.elitism else []
        return first + [winner(everyone) for _ in range(size - len(first))]
    worst = _best_first(fitness)
    replaced = set(worst[worst >= archived][size - count :].tolist())
    candidates = np.array([index for index in everyone if index not in replaced])
    return [
        winner(candidates) if index in replaced else Offspring(int(index), child=False) for index in everyone[archived:]
    ]


def truncation(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Replace the worst share `replace`, at most half, with children of as many of the best (arXiv 1711.09846).

    All others survive as themselves. In a population of two or more, at least one agent is replaced.
    """
    size = len(fitness) - archived
    count = min(max(1, round(settings.replace * size)), size // 2)
    best_first = _best_first(fitness)
    population = best_first[best_first >= archived]
    survivors = [Offspring(int(index), child=False) for index in population[: size - count]]
    return survivors + [Offspring(int(rng.choice(best_first[: max(1, count)])), child=True) for _ in range(count)]


def elite(fitness: NDArray[np.float64]) -> int:
    """Index of the best candidate; ties go to the last, which is the newest."""
    ranked = _ranked(fitness)
    return int(len(ranked) - 1 - np.argmax(ranked[::-1]))


def _best_first(fitness: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the candidates from best to worst; among equals the newest comes first."""
    return np.lexsort((-np.arange(len(fitness)), -_ranked(fitness)))


def _ranked(fitness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace NaN by -inf, so that agents without a fitness rank last."""
    return np.where(np.isnan(fitness), -np.inf, fitness)


def no_selection(
    fitness: NDArray[np.float64], archived: int, settings: Selection, rng: np.random.Generator
) -> list[Offspring]:
    """Keep every agent of the population as itself."""
    return [Offspring(place, child=False) for place in range(archived, len(fitness))]


SELECTIONS: Mapping[str, Select] = {"tournament": tournament, "truncation": truncation, "none": no_selection}


def ranks(fitness: NDArray[np.float64], among: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of `among` [P] that each fitness [N] beats, from 0 to 1; ties count half, and NaN ranks last."""
    below, tied = (
        compare(_ranked(among)[None, :], _ranked(fitness)[:, None]).mean(1) for compare in (np.less, np.equal)
    )
    shares: NDArray[np.float64] = below + tied / 2
    return shares


def note_ranks(agents: Sequence[Agent], settings: Evolution) -> None:
    """Append each agent's rank in this generation to its record, which goes back as far as the settings read it."""
    kept = settings.ranks_kept
    if not kept:
        return
    fitness = _fitness_of(agents)
    for agent, rank in zip(agents, ranks(fitness, fitness), strict=True):
        agent.ranks = (*agent.ranks, float(rank))[-kept:]


def rank_correlation(agents: Sequence[Agent]) -> float | None:
    """Spearman's correlation between the agents' ranks in the last two generations; None where it is undefined.

    It tells how far fitness can be trusted: noise ranks agents anew in every generation.
    """
    last = np.array([agent.ranks[-2:] for agent in agents if len(agent.ranks) >= 2])
    if len(last) < 2 or not last.std(0).all():
        return None
    return float(np.corrcoef(last.T)[0, 1])


def begins(settings: Evolution, generation: int, correlation: float | None, share_spent: float) -> bool:
    """True if selection begins after `generation`, of which the agents' ranks have this `correlation` with the last.

    With `burn_in: auto` it begins once fitness ranks agents as it did in the generation before, but at the latest when
    a third of the steps are spent.
    """
    if settings.burn_in == "auto":
        return share_spent >= LATEST_SHARE or (correlation is not None and correlation >= TRUSTED_CORRELATION)
    return generation > settings.burn_in


def _fitness_of(agents: Sequence[Agent]) -> NDArray[np.float64]:
    return np.array([np.nan if agent.fitness is None else agent.fitness for agent in agents])


def _scores(candidates: Sequence[Agent], archived: int, memory: int) -> NDArray[np.float64]:
    """Each candidate's fitness or, with a `memory` of several generations, its mean rank over these.

    A new agent has its parent's ranks. The archive is ranked among the population by its fitness in this generation.
    """
    fitness = _fitness_of(candidates)
    if memory == 1:
        return fitness
    past = [agent.ranks for agent in candidates]
    now = ranks(fitness[:archived], fitness[archived:])
    past[:archived] = [(*had, float(rank)) for had, rank in zip(past[:archived], now, strict=True)]
    means = np.array([np.mean(had[-memory:]) if had else np.nan for had in past])
    return np.where(np.isnan(fitness), np.nan, means)


def evolve(
    agents: Sequence[Agent],
    context: Context,
    next_id: int,
    rng: np.random.Generator,
    archive: Sequence[Agent] = (),
    generation: int = 1,
    archived: int | None = None,
    selects: bool = True,
) -> list[Agent]:
    """Select by fitness and mutate the children, or follow a schedule; without `selects` all agents train on.

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
    selection = context.settings.selection
    scores = _scores(candidates, len(archive), selection.memory)
    evolved = []
    name = selection.name if selects and len(agents) > 1 else "none"
    for offspring in SELECTIONS[name](scores, len(archive), selection, rng):
        if candidates[offspring.parent].fault:
            offspring = Offspring(elite(scores), child=True)
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
