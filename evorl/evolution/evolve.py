"""The step from one generation's agents to the next: selection, then mutation, or a recorded schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evorl.evolution.mutation import Context, mutate
from evorl.evolution.schedule import follow
from evorl.evolution.selection import SELECTIONS, Offspring, elite
from evorl.types import RESTORED, Agent


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
