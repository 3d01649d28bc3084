"""Selection, pure functions of the fitness and a random generator, and the step to the next generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config import Evolution, Selection
from evorl.evolution.mutation import Context, mutate
from evorl.types.agents import Agent

TRUSTED_CORRELATION, LATEST_SHARE = 0.7, 1 / 3
"""`burn_in: auto` ends once ranks of successive generations correlate by this, or this share of steps is spent."""
RANKED_GENERATIONS = 2
"""The number of newest generations whose ranks agents carry."""
FEWEST_RANKED = 8
"""Agents whose ranks are compared at least: random ranks correlate by 0.7 in half of the generations of two agents, in
17 % of those of four, and in 3 % of those of eight."""


class NextAgent(NamedTuple):
    """One agent of the next generation: a child of this candidate, to `mutate`, or the candidate itself."""

    candidate: int
    mutate: bool


def best_first(fitness: NDArray[np.float64], ids: Sequence[int]) -> list[int]:
    """The indices of agents from best to worst; those without a fitness, NaN, come last, and the newest wins ties."""
    order: list[int] = np.lexsort((-np.asarray(ids), -_ranked(fitness))).tolist()
    return order


ChooseParent = Callable[[Sequence[int], Sequence[int], Selection, np.random.Generator], int]
"""Chooses a child's parent among the `competing` agents, given all agents from best to worst."""


def tournament(
    competing: Sequence[int], best_first: Sequence[int], settings: Selection, rng: np.random.Generator
) -> int:
    """Tournament selection: the best of `size` agents drawn without replacement (Miller & Goldberg 1995)."""
    entrants = rng.choice(competing, size=min(settings.size, len(competing)), replace=False)
    return int(min(entrants, key=best_first.index))


SELECTIONS: Mapping[str, ChooseParent] = {"tournament": tournament}


def select(best_first: Sequence[int], settings: Selection, rng: np.random.Generator) -> list[NextAgent]:
    """Replace the worst share `replace` of the population with children; the next agents, in the population's order.

    Survivors keep their indices, train on untouched, and compete to be parents. If all agents are to be replaced, all
    compete, and only the best survives, at index 0: generational selection.
    """
    size = len(best_first)

    def child(competing: Sequence[int]) -> NextAgent:
        return NextAgent(SELECTIONS[settings.name](competing, best_first, settings, rng), mutate=True)

    if settings.replace == 1:
        return [NextAgent(best_first[0], mutate=False), *(child(range(size)) for _ in range(size - 1))]
    count = min(max(1, round(settings.replace * size)), size - 1)
    replaced = set(best_first[size - count :])
    surviving = [index for index in range(size) if index not in replaced]
    return [child(surviving) if index in replaced else NextAgent(index, mutate=False) for index in range(size)]


def _ranked(fitness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace NaN by -inf, so that agents without a fitness rank last."""
    return np.where(np.isnan(fitness), -np.inf, fitness)


def ranks(fitness: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of all that each fitness [N] beats, itself by half as a tie, so between 0 and 1; NaN ranks last."""
    values = _ranked(fitness)
    below, tied = (compare(values[None, :], values[:, None]).mean(1) for compare in (np.less, np.equal))
    shares: NDArray[np.float64] = below + tied / 2
    return shares


def note_ranks(agents: Sequence[Agent], settings: Evolution) -> None:
    """With `burn_in: auto`, record each agent's rank in this generation after that in the last one; else forget them,
    as a branch may have those of its origin."""
    fitness = _fitness_of(agents)
    for agent, rank in zip(agents, ranks(fitness), strict=True):
        agent.ranks = (*agent.ranks, float(rank))[-RANKED_GENERATIONS:] if settings.burn_in == "auto" else ()


def rank_correlation(agents: Sequence[Agent]) -> float | None:
    """Spearman's correlation between the agents' ranks in the last two generations.

    It shows how reliable fitness is: pure noise would rank agents at random in every generation. None where it is
    undefined, and of fewer than `FEWEST_RANKED` agents, whose ranks correlate by chance.
    """
    last = np.array([agent.ranks for agent in agents if len(agent.ranks) == RANKED_GENERATIONS])
    if len(last) < FEWEST_RANKED or not last.std(0).all():
        return None
    return float(np.corrcoef(last.T)[0, 1])


def selects(settings: Evolution, agents: int) -> bool:
    """True if selection applies to a population of this many agents."""
    return agents > 1 and settings.selection.name != "none"


def begins(settings: Evolution, generation: int, correlation: float | None, share_spent: float) -> bool:
    """True if selection begins after `generation`; `correlation` is between its and the previous ranks.

    With `burn_in: auto` it begins once fitness ranks agents as it did in the generation before, but at the latest when
    a third of the steps are spent, as always in populations too small for a correlation.
    """
    if settings.burn_in == "auto":
        return share_spent >= LATEST_SHARE or (correlation is not None and correlation >= TRUSTED_CORRELATION)
    return generation > settings.burn_in


def _fitness_of(agents: Sequence[Agent]) -> NDArray[np.float64]:
    return np.array([np.nan if agent.fitness is None else agent.fitness for agent in agents])


def evolve(
    agents: Sequence[Agent],
    context: Context,
    next_id: int,
    rng: np.random.Generator,
    generation: int = 1,
    begun: bool = True,
) -> list[Agent]:
    """Select by fitness and mutate the children; before selection has `begun` all agents train on.

    Ids of new agents count up from `next_id`, and each child records its parent's `generation`. An agent with a fault
    never survives: a child of the best without one takes its place. A population of one trains on without selection and
    mutation, since nothing would tell whether a mutation made it better.
    """
    order = best_first(_fitness_of(agents), [agent.id for agent in agents])
    evolved = []
    selecting = begun and selects(context.settings, len(agents))
    unchanged = [NextAgent(index, mutate=False) for index in range(len(agents))]
    for chosen in select(order, context.settings.selection, rng) if selecting else unchanged:
        if agents[chosen.candidate].fault:
            sound = (index for index in order if not agents[index].fault)
            chosen = NextAgent(next(sound), mutate=True)
        agent = agents[chosen.candidate]
        if chosen.mutate:
            agent = agent.child(next_id, generation)
            next_id += 1
            if selecting:
                mutate(agent, context, rng)
        evolved.append(agent)
    return evolved
