"""Statistics of few runs (Agarwal et al., arXiv 2108.13264), as defined in the paper's library rliable.

Scores are lists with one array per task, of one score per run; runs are resampled within each task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scores = Sequence[Array]


class Estimate(NamedTuple):
    """A point estimate with the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def interquartile_mean(scores: Scores) -> float:
    """Return the interquartile mean over all runs of all tasks: a quarter, rounded down, is trimmed at either end."""
    ordered = np.sort(np.concatenate(list(scores)))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(ours: Scores, theirs: Scores) -> float:
    """Return P(ours > theirs) for a random pair of runs, averaged over tasks; ties count half."""
    shares = [
        np.mean((x[:, None] > y[None]) + 0.5 * (x[:, None] == y[None])) for x, y in zip(ours, theirs, strict=True)
    ]
    return float(np.mean(shares))


def bootstrap(
    statistic: Callable[..., float],
    *samples: Scores,
    repetitions: int = 2000,
    confidence: float = 0.95,
    rng: np.random.Generator,
) -> Estimate:
    """Return a statistic of one or two groups of runs with its stratified percentile-bootstrap confidence interval."""
    draws = [
        statistic(*([task[rng.integers(len(task), size=len(task))] for task in scores] for scores in samples))
        for _ in range(repetitions)
    ]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Estimate(statistic(*samples), float(low), float(high))


def best_of(k: int, fitness: Array, scores: Array) -> float:
    """Return the expected score of the fittest of `k` agents drawn without replacement; ties share their mean score."""
    shared = np.array([scores[fitness == value].mean() for value in np.sort(fitness)])
    total = comb(len(fitness), k)
    weights = [comb(rank, k - 1) / total for rank in range(len(fitness))]
    return float(np.dot(weights, shared))


def successive_halving(fitness: Array, scores: Array, rungs: Sequence[int]) -> tuple[float, int]:
    """Return the score of the agent that successive halving selects, and the total generations trained by all agents.

    After each generation in `rungs` the better half by `fitness` [generations, agents] is kept; the fittest agent at
    the end is selected. The first of equals is preferred.
    """
    alive = np.arange(fitness.shape[1])
    learned = 0
    for number, row in enumerate(fitness, 1):
        learned += len(alive)
        if number in rungs:
            order = np.argsort(-row[alive], kind="stable")
            alive = np.sort(alive[order[: max(1, len(alive) // 2)]])
    return float(scores[alive[np.argmax(fitness[-1][alive])]]), learned
