"""Fitness of a generation's agents, from evaluation episodes or from those of training. Axes: P agents, N episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from evorl.config import AnyConfig
from evorl.envs.games.vector import RESULT
from evorl.league.league import Rated
from evorl.population import Policy
from evorl.population.evaluation import EpisodeResults, Evaluator
from evorl.types.agents import Agent

SHIFT_EPISODES = 2
"""Deterministic episodes of each agent, over all ranks, that estimate the shift of algorithms that explore by noise."""


@dataclass(frozen=True)
class Fitness:
    """The fitness of all agents in a generation, the same on all ranks.

    `mean`, `std` and `episodes` are [P]: the mean over `episodes` episodes and its sample standard deviation (n - 1),
    both NaN where unknown.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    episodes: NDArray[np.float64]
    seen: NDArray[np.float64]
    """Returns of any shape, or means of returns, none of which is below the worst return of the generation."""
    evaluated: NDArray[np.float64] | None = None
    """The fitness in each evaluation episode [P, N]; None if training gave it."""
    terms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """The means [P] of the possible fitness terms by name; empty if training gave it."""
    elite: float | None = None
    """The elite's rating, or NaN without an elite, where fitness is a rating; None elsewhere."""
    steps: int = 0
    """The steps of all agents in evaluation episodes, those of the elite's challenge and of comparisons included, and
    the moves of both seats in matches."""

    @classmethod
    def of_ratings(cls, rated: Rated) -> Self:
        """Ratings, with the standard deviation per game that their errors imply, and mean results as a term."""
        return cls(
            mean=rated.ratings,
            std=rated.errors * np.sqrt(rated.games),
            episodes=rated.games,
            seen=np.zeros(0),
            terms={RESULT: rated.results},
            elite=rated.elite,
        )

    @classmethod
    def of_evaluation(cls, results: EpisodeResults, weights: Mapping[str, float]) -> Self:
        """The mean of the weighted terms over evaluation episodes; a single one has no standard deviation."""
        values = results.fitness(weights)
        single = values.shape[1] == 1
        return cls(
            mean=np.array([row.mean() for row in values]),
            std=np.full(len(values), np.nan) if single else np.array([row.std(ddof=1) for row in values]),
            episodes=np.full(len(values), float(values.shape[1])),
            seen=values,
            evaluated=values,
            terms={name: means.mean(1) for name, means in results.terms().items()},
        )

    @classmethod
    def of_training(
        cls,
        returns: NDArray[np.float64],
        episodes: NDArray[np.float64],
        deterministic: NDArray[np.float64] | None = None,
    ) -> Self:
        """The mean returns [P] of this many training `episodes`, NaN where there is none.

        With the `deterministic` returns [P, N] of the same agents, all means are shifted by the population's mean
        difference. Agents keep their order, and means are comparable with those of evaluation. One shift per agent
        would amount to an evaluation with that few episodes.
        """
        shifted, seen = returns, returns
        if deterministic is not None:
            differences = deterministic.mean(1) - returns
            finite = differences[np.isfinite(differences)]
            shifted = returns + (finite.mean() if finite.size else 0.0)
            seen = np.append(deterministic, returns)
        return cls(shifted, np.full_like(returns, np.nan), episodes, seen)


def generation_fitness(
    config: AnyConfig,
    policy: Policy,
    trained: Sequence[Agent],
    evaluator: Evaluator,
    generation: int,
    returns: NDArray[np.float64],
    episodes: NDArray[np.float64],
) -> Fitness:
    """The fitness of the `trained` agents by `evaluation.fitness`; `policy` acts for those of this rank.

    `returns` and `episodes` [P] are the mean return and the number of the episodes of training, over all ranks. If an
    agent has fewer of them than `evaluation.episodes`, all agents are evaluated: agents with long episodes are the
    first to have few, and only values of one kind can be compared. Agents that a fault stopped have no fitness.
    """
    learning = np.array([agent.fault is None for agent in trained])
    enough = learning.any() and bool((episodes[learning] >= config.evaluation.episodes).all())
    if config.evaluation.fitness == "evaluation" or not enough:
        return Fitness.of_evaluation(evaluator.evaluate(policy, generation), config.evolution.fitness)
    deterministic = None
    if evaluator.algorithm.explores_by_noise:
        deterministic = evaluator.evaluate(policy, generation, SHIFT_EPISODES).returns
    return Fitness.of_training(np.where(learning, returns, np.nan), episodes, deterministic)
