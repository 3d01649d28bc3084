"""Statistics of few runs (Agarwal et al., arXiv 2108.13264), as defined in the paper's library rliable.

Scores are lists with one array per task, of one score per run; runs are resampled within each task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def shares_of_trials(count: int) -> Array:
    """Return the probability that the fittest of k agents has rank r, [count, count]: k - 1 by r, without replacement.

    The rows are the weights of the expected best of k. The estimate is unbiased, unlike that by drawing with
    replacement (Tang et al., arXiv 2004.13705).
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
    fittest, and the equally fit share their mean score. Numbers between two whole ones are interpolated. If the mean
    exceeds the best of all trials, their number is returned. The bootstrap resamples the values and whole pools.
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
