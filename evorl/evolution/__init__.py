"""From one generation's agents to the next's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evorl.evolution.mutation import MUTATIONS, Context, mutate
from evorl.evolution.selection import SELECTIONS, Place, elite
from evorl.types import Agent


def evolve(agents: Sequence[Agent], context: Context, next_id: int, rng: np.random.Generator) -> list[Agent]:
    """Select by fitness and mutate the children. New agents count their ids up from `next_id`.

    An agent with a fault never goes on: a child of the best agent takes its place.
    """
    fitness = np.array([np.nan if agent.fitness is None else agent.fitness for agent in agents])
    selection = context.settings.selection
    evolved = []
    for place in SELECTIONS[selection.name](fitness, selection, rng):
        if agents[place.parent].fault:
            place = Place(elite(fitness), child=True)
        agent = agents[place.parent]
        if place.child:
            agent = agent.child(next_id)
            next_id += 1
            mutate(agent, context, rng)
        evolved.append(agent)
    return evolved


__all__ = ["MUTATIONS", "SELECTIONS", "Context", "elite", "evolve"]
