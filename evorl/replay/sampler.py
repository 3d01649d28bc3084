"""Draw from the union of all ranks' replay as if it were one buffer. Axes: U updates, P agents, B batch, R ranks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def share_of_draws(
    draws: NDArray[np.int64], sizes: NDArray[np.int64], rank: int, offset: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return how many of `draws` [...] fall on `rank`, whose part is sizes[rank] of sizes [R].

    Systematic sampling (Madow 1949): with one `offset` [...] in [0, 1) that all ranks share, rank r's count is the
    number of points of the grid (i + offset) on its stretch of the union. Counts sum to `draws`, differ from their
    expectation by less than one, and have exactly that expectation, so each transition of the union is equally likely;
    with equal parts every rank draws the same number.
    """
    edges = np.concatenate([[0], np.cumsum(sizes)]) / max(1, int(sizes.sum()))
    # The 1e-9 keeps a rounding error at an edge from moving a draw to the next rank.
    upper = np.floor(draws * edges[rank + 1] + offset + 1e-9)
    lower = np.floor(draws * edges[rank] + offset + 1e-9)
    return np.asarray(upper - lower, dtype=np.int64)


class DistributedSampler:
    """Each rank draws its share from its own part, with replacement; no transition travels.

    `draws` [P] are those of an agent's update, of all R ranks together. Batches are [U, P, B] with B the largest share
    of any agent; each draw weighs R / draws, so that the mean over ranks of their weighted sums is the mean over the
    agent's draws from the union.

    `shared` must give the same numbers on every rank, `own` different ones.
    """

    def __init__(self, rank: int, draws: NDArray[np.int64], shared: np.random.Generator, own: torch.Generator) -> None:
        self._rank = rank
        self._draws = draws
        self._shared = shared
        self._own = own
        self._weights: dict[tuple[int, ...], Tensor] = {}

    def draw(self, updates: int, sizes: NDArray[np.int64], drawable: int) -> tuple[Tensor, Tensor]:
        """Return positions [U, P, B] in this rank's part, below `drawable`, and their weights [U, P, B].

        `sizes` [R] are those of the parts as all ranks know them; a part may hold less where environments failed.
        """
        agents = len(self._draws)
        offset = self._shared.random((updates, agents))
        counts = share_of_draws(self._draws, sizes, self._rank, offset)
        # A rank on which no draw falls takes part all the same, with a weight of zero.
        width = max(1, int(counts.max()))
        index = torch.randint(max(1, drawable), (updates, agents, width), generator=self._own, device=self._own.device)
        return index, self._weight(counts, width, len(sizes))

    def _weight(self, counts: NDArray[np.int64], width: int, ranks: int) -> Tensor:
        key = (*counts.shape, *counts.ravel().tolist())
        weight = self._weights.get(key)
        if weight is None:
            drawn = np.arange(width) < counts[..., None]
            values = drawn * ranks / self._draws[:, None]
            weight = torch.from_numpy(values.astype(np.float32)).to(self._own.device)
            self._weights = {key: weight}
        return weight
