"""Statistics of few runs (Agarwal et al., arXiv 2108.13264), as its library rliable defines them.

Scores are lists with one array for each task, of one score per run; whole runs are resampled, within each task.
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
    """A statistic, and the ends of its interval."""

    value: float
    low: float
    high: float


def interquartile_mean(scores: Scores) -> float:
    """Return the mean of the middle half of all runs of all tasks: a quarter is cut off at either end, rounded down."""
    ordered = np.sort(np.concatenate(list(scores)))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(ours: Scores, theirs: Scores) -> float:
    """Return the mean over tasks of the probability that one of our runs beats one of theirs; ties count half."""
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
    """Return a statistic of one or two groups of runs with its percentile interval, stratified by task."""
    draws = [
        statistic(*([task[rng.integers(len(task), size=len(task))] for task in scores] for scores in samples))
        for _ in range(repetitions)
    ]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Estimate(statistic(*samples), float(low), float(high))


def best_of(k: int, fitness: Array, scores: Array) -> float:
    """Return the expected score of the fittest of `k` agents, drawn without replacement; ties share their score."""
    shared = np.array([scores[fitness == value].mean() for value in np.sort(fitness)])
    total = comb(len(fitness), k)
    weights = [comb(rank, k - 1) / total for rank in range(len(fitness))]
    return float(np.dot(weights, shared))


def successive_halving(fitness: Array, scores: Array, rungs: Sequence[int]) -> tuple[float, int]:
    """Return the score of what successive halving would hand out, and the generations that all its agents learn.

    After each generation number in `rungs` the better half goes on, by its `fitness` [generations, agents] then; the
    fittest of those left in the end is handed out. Of equals the first goes on.
    """
    alive = np.arange(fitness.shape[1])
    learned = 0
    for number, row in enumerate(fitness, 1):
        learned += len(alive)
        if number in rungs:
            order = np.argsort(-row[alive], kind="stable")
            alive = np.sort(alive[order[: max(1, len(alive) // 2)]])
    return float(scores[alive[np.argmax(fitness[-1][alive])]]), learned
