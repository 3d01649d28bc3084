"""Running means and variances that merge exactly. Axes: P agents, N samples, D numbers of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Moments(NamedTuple):
    """Number of samples [P], their mean [P, D] and their variance [P, D]."""

    number: Array
    mean: Array
    variance: Array

    @classmethod
    def of(cls, samples: Array, weight: Array) -> Moments:
        """Of samples [P, N, D], counting those whose weight [P, N] is 1 and not those whose weight is 0."""
        count = weight.sum(1)
        shares = (weight / np.maximum(count, 1)[:, None])[..., None]
        mean = (samples * shares).sum(1)
        return cls(count, mean, ((samples - mean[:, None]) ** 2 * shares).sum(1))

    @classmethod
    def over_ranks(cls, samples: Array, weight: Array, gather: Callable[[Array], Array]) -> Moments:
        """Of such samples on all ranks that `gather` asks."""
        first, *others = (cls.unpacked(packed) for packed in gather(cls.of(samples, weight).packed()))
        for other in others:
            first = first.merged(other)
        return first

    def merged(self, other: Moments) -> Moments:
        """Of both sets of samples together (Chan, Golub & LeVeque 1983)."""
        count = self.number + other.number
        share = (other.number / np.maximum(count, 1))[:, None]
        change = other.mean - self.mean
        variance = self.variance * (1 - share) + other.variance * share + change**2 * share * (1 - share)
        return Moments(count, self.mean + change * share, variance)

    def part(self, agents: slice | NDArray[np.intp]) -> Moments:
        """Return those of some of the agents."""
        return Moments(*(values[agents] for values in self))

    def packed(self) -> Array:
        """As one array [P, 1 + 2 D], to be exchanged with other ranks."""
        return np.concatenate([self.number[:, None], self.mean, self.variance], axis=1)

    @classmethod
    def unpacked(cls, packed: Array) -> Moments:
        """Return the moments that `packed` gave as an array."""
        width = (packed.shape[1] - 1) // 2
        return cls(packed[:, 0], packed[:, 1 : 1 + width], packed[:, 1 + width :])
