"""From one generation's agents to the next's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evorl.evolution.mutation import Context, mutate
from evorl.evolution.schedule import follow
from evorl.evolution.selection import SELECTIONS, Offspring, elite
from evorl.records import RESTORED
from evorl.types import Agent


def evolve(
    agents: Sequence[Agent],
    context: Context,
    next_id: int,
    rng: np.random.Generator,
    archive: Sequence[Agent] = (),
    generation: int = 1,
    archived: int | None = None,
) -> list[Agent]:
    """Select by fitness and mutate the children, where that is due after `generation`, or follow a schedule.

    New agents count their ids up from `next_id`. They note the generation that their parents come from, which for those
    of the archive is `archived`.

    Agents of the `archive` compete as parents; one that wins a place as itself fills it as a child without mutation,
    since an agent of its identity may have trained on. An agent with a fault never goes on: a child of the best one
    takes its place. An agent that is alone trains on, without selection and mutation: nothing tells whether a mutation
    made it better, and the archive would put it back to its own past.
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
