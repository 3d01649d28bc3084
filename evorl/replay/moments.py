"""Running means and variances that merge exactly. Axes: P agents, N samples, D components per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Gather = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""All-gather [...] -> [R, ...] over the ranks that hold the same agents; R = 1 where agents are not replicated."""


class Moments(NamedTuple):
    """Sample count [P], mean [P, D] and (population) variance [P, D]."""

    number: Array
    mean: Array
    variance: Array

    @classmethod
    def of(cls, samples: Array, weight: Array) -> Moments:
        """Return the moments of samples [P, N, D], with weight [P, N] 1 to include a sample and 0 to exclude it."""
        count = weight.sum(1)
        shares = (weight / np.maximum(count, 1)[:, None])[..., None]
        mean = (samples * shares).sum(1)
        return cls(count, mean, ((samples - mean[:, None]) ** 2 * shares).sum(1))

    @classmethod
    def over_ranks(cls, samples: Array, weight: Array, gather: Callable[[Array], Array]) -> Moments:
        """Return the moments of such samples over all ranks reached by `gather`."""
        first, *others = (cls.unpacked(packed) for packed in gather(cls.of(samples, weight).packed()))
        for other in others:
            first = first.merged(other)
        return first

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sample sets together (Chan, Golub & LeVeque 1983)."""
        count = self.number + other.number
        share = (other.number / np.maximum(count, 1))[:, None]
        change = other.mean - self.mean
        variance = self.variance * (1 - share) + other.variance * share + change**2 * share * (1 - share)
        return Moments(count, self.mean + change * share, variance)

    def part(self, agents: slice | NDArray[np.intp]) -> Moments:
        """Select the moments of some of the agents."""
        return Moments(*(values[agents] for values in self))

    def packed(self) -> Array:
        """Pack into one array [P, 1 + 2 D] for communication."""
        return np.concatenate([self.number[:, None], self.mean, self.variance], axis=1)

    @classmethod
    def unpacked(cls, packed: Array) -> Moments:
        """Inverse of `packed`."""
        width = (packed.shape[1] - 1) // 2
        return cls(packed[:, 0], packed[:, 1 : 1 + width], packed[:, 1 + width :])
