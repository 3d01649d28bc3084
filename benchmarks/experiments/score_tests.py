"""Exact tests for few runs, and their power."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import product
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from score_statistics import Array

Name = TypeVar("Name", bound=Hashable)
EXACT = 16
"""The largest number of pairs for which all flips of signs are enumerated."""
FLIPS = 100_000
"""The number of random flips for more pairs."""


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
