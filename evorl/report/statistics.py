"""Means of small samples with Student's t confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t quantiles of 0.975 for 1 to 10 degrees of freedom (Abramowitz & Stegun 1964, table 26.10)."""

POINTS = 1_000
"""The maximum number of points of a curve; more would fall into the same pixel."""
Item = TypeVar("Item")


class Interval(NamedTuple):
    """Sample size, mean and its 95 % confidence interval, which is None for a single value."""

    number: int
    mean: float
    low: float | None
    high: float | None


def quantile(freedom: int) -> float:
    """Return Student's t quantile of 0.975; beyond the table by the expansion of Abramowitz & Stegun 1964, 26.7.5."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """Return the mean of values [N], N >= 1, and its 95 % confidence interval (Student's t)."""
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Interval(count, mean, None, None)
    half = quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(count, mean, mean - half, mean + half)


def thinned(points: Sequence[Item]) -> Sequence[Item]:
    """Return at most `POINTS` evenly spaced items, including the last one."""
    stride = max(1, -(-len(points) // POINTS))
    return points[(len(points) - 1) % stride :: stride]
