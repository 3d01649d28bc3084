"""Selection operators, pure functions of the fitness and a random generator, and the step to the next generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.config import Evolution, Selection
from evorl.evolution.mutation import Context, mutate
from evorl.types.agents import RESTORED, Agent

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


class Candidates(NamedTuple):
    """The agents to select from, by their fitness [N].

    The first `archived` are from the archive; they do not count towards the population size. The others are the
    population in order. An agent without fitness has NaN. Ties go to the highest of `ids` [N], the newest agent, or
    without ids to the last one.
    """

    fitness: NDArray[np.float64]
    archived: int = 0
    ids: Sequence[int] | None = None

    @property
    def population(self) -> range:
        """The indices of the candidates that are not from the archive."""
        return range(self.archived, len(self.fitness))

    def order(self) -> list[int]:
        """The indices of all candidates from best to worst."""
        ids = range(len(self.fitness)) if self.ids is None else self.ids
        order: list[int] = np.lexsort((-np.asarray(ids), -_ranked(self.fitness))).tolist()
        return order

    def best_first(self) -> list[int]:
        """The indices of the population from best to worst."""
        return [index for index in self.order() if index >= self.archived]


Select = Callable[[Candidates, Selection, np.random.Generator], list[NextAgent]]
"""Chooses the agents of the next generation, as many as the population has, in its order."""


def tournament(candidates: Candidates, settings: Selection, rng: np.random.Generator) -> list[NextAgent]:
    """Tournament selection: replace the worst share `replace` of the population with children of tournament winners.

    The best of `size` candidates sampled without replacement wins (Miller & Goldberg 1995). Survivors keep their
    indices, train on untouched, and are the candidates, together with the archive. If all agents are to be replaced,
    all compete, and only the best candidate survives, at index 0: generational selection.
    """
    order, size = candidates.order(), len(candidates.population)
    count = size if settings.replace == 1 else min(max(1, round(settings.replace * size)), size - 1)

    def child_of_winner(competing: Sequence[int]) -> NextAgent:
        entrants = rng.choice(competing, size=min(settings.size, len(competing)), replace=False)
        return NextAgent(int(min(entrants, key=order.index)), mutate=True)

    if count >= size:
        return [NextAgent(order[0], mutate=False), *(child_of_winner(range(len(order))) for _ in range(size - 1))]
    replaced = set(candidates.best_first()[size - count :])
    surviving = [index for index in range(len(order)) if index not in replaced]
    return [
        child_of_winner(surviving) if index in replaced else NextAgent(index, mutate=False)
        for index in candidates.population
    ]


def truncation(candidates: Candidates, settings: Selection, rng: np.random.Generator) -> list[NextAgent]:
    """Replace the worst share `replace`, at most half, with children of as many of the best (arXiv 1711.09846).

    All others survive at their indices. In a population of two or more, at least one agent is replaced.
    """
    size = len(candidates.population)
    count = min(max(1, round(settings.replace * size)), size // 2)
    replaced = set(candidates.best_first()[size - count :])
    parents = candidates.order()[: max(1, count)]
    return [
        NextAgent(int(rng.choice(parents)), mutate=True) if index in replaced else NextAgent(index, mutate=False)
        for index in candidates.population
    ]


def _ranked(fitness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace NaN by -inf, so that agents without a fitness rank last."""
    return np.where(np.isnan(fitness), -np.inf, fitness)


def no_selection(candidates: Candidates, settings: Selection, rng: np.random.Generator) -> list[NextAgent]:
    """Keep every agent of the population as itself."""
    return [NextAgent(index, mutate=False) for index in candidates.population]


SELECTIONS: Mapping[str, Select] = {
    "tournament": tournament,
    "truncation": truncation,
    "none": no_selection,
}


def ranks(fitness: NDArray[np.float64], among: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of `among` [P] that each fitness [N] beats, from 0 to 1; ties count half, and NaN ranks last."""
    below, tied = (
        compare(_ranked(among)[None, :], _ranked(fitness)[:, None]).mean(1) for compare in (np.less, np.equal)
    )
    shares: NDArray[np.float64] = below + tied / 2
    return shares


def note_ranks(agents: Sequence[Agent], settings: Evolution) -> None:
    """With `burn_in: auto`, record each agent's rank in this generation after that in the last one."""
    if settings.burn_in != "auto":
        return
    fitness = _fitness_of(agents)
    for agent, rank in zip(agents, ranks(fitness, fitness), strict=True):
        agent.ranks = (*agent.ranks, float(rank))[-RANKED_GENERATIONS:]


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
    archive: Sequence[Agent] = (),
    generation: int = 1,
    archived: int | None = None,
    selects: bool = True,
) -> list[Agent]:
    """Select by fitness and mutate the children; without `selects` all agents train on.

    Ids of new agents count up from `next_id`. Each child records its parent's generation, which is `archived` for
    parents from the archive.

    Agents of the `archive` compete as parents. One that survives as itself becomes a child without mutation, since an
    agent with its id may have trained on. An agent with a fault never survives: a child of the elite takes its place. A
    population of one trains on without selection and mutation: nothing would tell whether a mutation made it better,
    and the archive would reset it to its own past.
    """
    if context.settings.burn_in == "auto":
        # An archived agent's last rank made it the elite, perhaps by luck, which its children would inherit: only its
        # present rank counts.
        now = ranks(_fitness_of(archive), _fitness_of(agents))
        archive = [replace(agent, ranks=(float(rank),)) for agent, rank in zip(archive, now, strict=True)]
    candidates = [*archive, *agents]
    selection = context.settings.selection
    # An archived agent is older than those of the population, also than the one with its id that trained on.
    ids = [*range(-len(archive), 0), *(agent.id for agent in agents)]
    competing = Candidates(_fitness_of(candidates), len(archive), ids)
    evolved = []
    name = selection.name if selects and len(agents) > 1 else "none"
    for chosen in SELECTIONS[name](competing, selection, rng):
        if candidates[chosen.candidate].fault:
            chosen = NextAgent(competing.order()[0], mutate=True)
        agent, is_archived = candidates[chosen.candidate], chosen.candidate < len(archive)
        if chosen.mutate or is_archived:
            agent = agent.child(next_id, archived if is_archived else generation)
            next_id += 1
            if not chosen.mutate:
                agent.mutation = RESTORED
            elif name != "none":
                mutate(agent, context, rng)
        evolved.append(agent)
    return evolved
