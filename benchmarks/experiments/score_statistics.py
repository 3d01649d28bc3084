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


def shares_of_trials(count: int) -> Array:
    """Return the probability that the fittest of k agents has rank r, [count, count]: k - 1 by r, without replacement.

    The rows are the weights of `best_of` for all k. The estimate is unbiased, unlike that by drawing with replacement
    (Tang et al., arXiv 2004.13705).
    """
    factorials = np.append(0.0, np.log(np.arange(1, count + 1)).cumsum())
    k, rank = np.arange(1, count + 1)[:, None], np.arange(count)[None]
    left = rank - (k - 1)
    logarithms = (
        factorials[rank] - factorials[k - 1] - factorials[left.clip(0)]
        + factorials[k] + factorials[count - k] - factorials[count]
    )  # fmt: skip
    return np.where(left >= 0, np.exp(logarithms), 0.0)


def worth_in_trials(
    values: Array, pools: Sequence[Array], repetitions: int = 2000, *, rng: np.random.Generator
) -> Estimate:
    """Return the number of random trials whose expected best equals the mean of `values`, with a 95 % interval.

    The trials are the agents of all `pools`, each [agents, 2] of fitness and score, as many in each; the best is the
    fittest, as in `best_of`. Numbers between two whole ones are interpolated. If the mean exceeds the best of all
    trials, their number is returned. The bootstrap resamples the values and whole pools.
    """
    shares = shares_of_trials(sum(map(len, pools)))

    def worth(mean: float, trials: Array) -> float:
        fitness, place = np.unique(trials[:, 0], return_inverse=True)
        tied = np.bincount(place, trials[:, 1]) / np.bincount(place, minlength=len(fitness))
        curve = shares @ tied[np.sort(place)]
        reached = curve >= mean
        if not reached.any():
            return float(len(curve))
        first = int(reached.argmax())
        return 1.0 if first == 0 else float(np.interp(mean, curve[first - 1 : first + 1], [first, first + 1]))

    draws = []
    for _ in range(repetitions):
        chosen = rng.integers(len(pools), size=len(pools))
        drawn = values[rng.integers(len(values), size=len(values))]
        draws.append(worth(float(drawn.mean()), np.concatenate([pools[one] for one in chosen])))
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(worth(float(values.mean()), np.concatenate(list(pools))), float(low), float(high))


def improvement_by_trials(more: int, fewer: int, trials: Array) -> float:
    """Return the probability that random search with `more` trials ends higher than with `fewer`; ties count half.

    The agents of both searches are drawn with replacement from `trials` [agents, 2] of fitness and score, and each
    search selects its fittest.
    """
    order = np.argsort(trials[:, 0], kind="stable")
    _, place = np.unique(trials[order, 0], return_inverse=True)
    sizes = np.bincount(place)
    ends = sizes.cumsum() / len(trials)
    scores = trials[order, 1]
    ours, theirs = (
        (np.diff(np.append(0.0, ends**k)) / sizes)[place] for k in (more, fewer)
    )  # fmt: skip
    higher = (scores[:, None] > scores[None]) + 0.5 * (scores[:, None] == scores[None])
    return float(ours @ higher @ theirs)


def rank_correlation(x: Array, y: Array) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank, and a constant gives NaN."""
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (x, y)]
    centred = [one - one.mean() for one in ranks]
    size = float(np.sqrt(np.prod([np.square(one).sum() for one in centred])))
    return float(centred[0] @ centred[1]) / size if size else float("nan")


def _ranks(values: Array) -> Array:
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    ranks: Array = below + (equal - 1) / 2
    return ranks


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
