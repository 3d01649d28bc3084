"""Exact tests for few runs, and their power."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import reduce
from itertools import product
from math import comb, sqrt
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from score_statistics import Array

Name = TypeVar("Name", bound=Hashable)
EXACT = 16
"""The largest number of pairs for which all flips of signs are enumerated."""
FLIPS = 100_000
"""The number of random flips for more pairs."""


def fisher_exact(ours: tuple[int, int], theirs: tuple[int, int]) -> float:
    """Return the two-sided p of Fisher's exact test for two groups, each given as counts (with, without).

    All tables with the same margins that are at most as probable as the observed one count.
    """
    with_it, size, total = ours[0] + theirs[0], sum(ours), sum(ours) + sum(theirs)

    def probability(count: int) -> float:
        return comb(with_it, count) * comb(total - with_it, size - count) / comb(total, size)

    observed = probability(ours[0]) * (1 + 1e-9)
    possible = range(max(0, size - (total - with_it)), min(with_it, size) + 1)
    return sum(found for found in map(probability, possible) if found <= observed)


def flips(pairs: int, draws: int, rng: np.random.Generator) -> Array:
    """Return `draws` random assignments of signs [draws, pairs]."""
    return rng.choice(np.array([-1.0, 1.0]), size=(draws, pairs))


def sign_flip_test(differences: Array, rng: np.random.Generator) -> float:
    """Return the two-sided p of the permutation test that flips the signs of paired differences (Fisher 1935).

    The statistic is their mean. Up to 16 pairs all flips are enumerated; for more, 100,000 are drawn, and the observed
    one counts among them (Phipson and Smyth 2010).
    """
    # Sums that differ by rounding are equal.
    observed = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()
    if len(differences) <= EXACT:
        every = np.array(list(product((-1.0, 1.0), repeat=len(differences))))
        return float(np.mean(np.abs(every @ differences) >= observed))
    drawn = np.abs(flips(len(differences), FLIPS, rng) @ differences) >= observed
    return float(1 + drawn.sum()) / (1 + FLIPS)


def sign_flip_power(
    pairs: int, chance: float, level: float, rng: np.random.Generator, runs: int = 2000, draws: int = 2000
) -> float:
    """Return the power of `sign_flip_test` at a true probability of improvement of `chance`, by simulation.

    Paired differences are normally distributed. Their standard deviation does not matter, since neither the test nor
    the probability depends on it.
    """
    differences = rng.normal(NormalDist().inv_cdf(chance), 1, size=(pairs, runs))
    observed = np.abs(differences.sum(0)) - 1e-12 * np.abs(differences).sum(0)
    if 2**pairs <= draws:
        every = np.array(list(product((-1.0, 1.0), repeat=pairs)))
        p = np.mean(np.abs(every @ differences) >= observed, axis=0)
    else:
        p = (1 + (np.abs(flips(pairs, draws, rng) @ differences) >= observed).sum(0)) / (1 + draws)
    return float(np.mean(p <= level))


def holm(found: Mapping[Name, float], tests: int) -> dict[Name, float]:
    """Return Holm's (1979) adjusted p by name. Of the planned `tests`, those not in `found` yet count as p = 1."""
    adjusted: dict[Name, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(found.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (tests - place) * p))
        adjusted[name] = largest
    return adjusted


def rank_sum_distribution(ours: int, theirs: int) -> Array:
    """Return the null distribution of Mann and Whitney's U [ours * theirs + 1] without ties.

    U counts the pairs of runs in which ours is higher. The highest of all runs is either ours, and beats all of theirs,
    or one of theirs, and beats none for us (Mann and Whitney 1947).
    """
    before = [np.ones(1)] * (theirs + 1)
    for m in range(1, ours + 1):
        row = [np.ones(1)]
        for n in range(1, theirs + 1):
            counts = np.zeros(m * n + 1)
            counts[n:] += before[n]
            counts[: m * (n - 1) + 1] += row[n - 1]
            row.append(counts)
        before = row
    return before[theirs] / comb(ours + theirs, ours)


class RankSum:
    """The exact two-sided rank-sum test at 5 %, by simulation of normally distributed scores of equal variance.

    With several tasks of as many runs, U is summed over tasks.
    """

    def __init__(self, ours: int, theirs: int, tasks: int = 1, *, rng: np.random.Generator, runs: int = 40_000) -> None:
        null = reduce(np.convolve, [rank_sum_distribution(ours, theirs)] * tasks)
        self.rejected = 2 * np.minimum(null.cumsum(), null[::-1].cumsum()[::-1]) <= 0.05
        self.ours = rng.normal(size=(tasks, runs, ours))
        self.theirs = rng.normal(size=(tasks, runs, theirs))

    def power(self, chance: float) -> float:
        """Return the power at a true probability of improvement of `chance` on each task."""
        ours = self.ours + sqrt(2) * NormalDist().inv_cdf(chance)
        won = sum((ours[..., place, None] > self.theirs).sum((0, 2)) for place in range(ours.shape[-1]))
        return float(np.mean(self.rejected[won]))

    def distinguishable(self, power: float = 0.8) -> float:
        """Return the smallest probability of improvement that the test distinguishes from 0.5 with this power."""
        low, high = 0.5, 1 - 1e-9
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if self.power(middle) >= power else (middle, high)
        return high
