"""Index of drawable slots, and places of true last observations. Axes: N streams, B batch.

Rows are numbered from the start of the storage; stream n of row t is slot number t * N + n. Entries are appended at the
newest row and dropped at the oldest, so the ring is never scanned, and nothing is stored while every slot is valid.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]


class GapIndex:
    """Finds the k-th valid slot from the invalid slots (gaps).

    Gap i, at slot number g, has g - i valid slots before it. These counts never decrease, so a binary search gives the
    number of gaps before the k-th valid slot, which shift it by that many.
    """

    def __init__(self, streams: int, device: torch.device) -> None:
        self._streams = streams
        self._before = torch.zeros(64, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Remove all gaps."""
        self.held = 0
        """Number of gaps."""
        self._head = 0
        self._dropped = 0
        self._rows: deque[tuple[int, int]] = deque()

    def append(self, numbers: Integers) -> None:
        """Add gaps [B] at ascending slot numbers beyond all earlier ones."""
        count = len(numbers)
        if not count:
            return
        self._make_room(count)
        tail = self._head + self.held
        earlier = self._dropped + self.held + np.arange(count)
        self._before[tail : tail + count] = torch.from_numpy(numbers - earlier)
        self.held += count
        first, last = int(numbers[0]) // self._streams, int(numbers[-1]) // self._streams
        if first == last:
            self._rows.append((first, count))
            return
        rows, counts = np.unique(numbers // self._streams, return_counts=True)
        self._rows.extend(zip(rows.tolist(), counts.tolist(), strict=True))

    def drop(self, oldest: int) -> None:
        """Remove the gaps of rows before `oldest`."""
        while self._rows and self._rows[0][0] < oldest:
            count = self._rows.popleft()[1]
            self._head += count
            self._dropped += count
            self.held -= count

    def find(self, index: Tensor, oldest: int) -> Tensor:
        """Return the slot numbers [...] of the valid slots at positions `index` [...], counted from row `oldest`."""
        wanted = index + (oldest * self._streams - self._dropped)
        gaps = self._before[self._head : self._head + self.held]
        return wanted + torch.searchsorted(gaps, wanted, right=True).add_(self._dropped)

    def _make_room(self, count: int) -> None:
        """Compact the gaps to the front if `count` more would not fit, enlarging the buffer if needed."""
        if self._head + self.held + count <= len(self._before):
            return
        gaps = self._before[self._head : self._head + self.held].clone()
        # At most half full after a move, so that the amortised cost of moves is constant.
        if 2 * (self.held + count) > len(self._before):
            self._before = torch.zeros(4 * (self.held + count), dtype=torch.int64, device=gaps.device)
        self._before[: self.held] = gaps
        self._head = 0


class LastPlaces:
    """Ring of `size` places for true last observations, with the slots they belong to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Remove all entries."""
        self.held = 0
        """Number of entries."""
        self._head = 0
        self._rows: deque[tuple[int, Integers]] = deque()

    @property
    def oldest_row(self) -> int:
        """Number of the first row with an entry."""
        return self._rows[0][0]

    def append(self, row: int, streams: Integers) -> Integers:
        """Reserve and return places [B] for a row's `streams` [B]; there must be room."""
        places = (self._head + self.held + np.arange(len(streams))) % self.size
        self._rows.append((row, streams))
        self.held += len(streams)
        return places

    def drop(self, oldest: int) -> list[tuple[int, Integers]]:
        """Remove the entries of rows before `oldest`, and return these rows with their streams."""
        dropped = []
        while self._rows and self._rows[0][0] < oldest:
            dropped.append(self._rows.popleft())
            count = len(dropped[-1][1])
            self._head = (self._head + count) % self.size
            self.held -= count
        return dropped

    def places(self) -> Integers:
        """Return all places in use [B], oldest first."""
        return (self._head + np.arange(self.held)) % max(1, self.size)

    def numbers(self, streams: int) -> Integers:
        """Return the slot numbers [B] of all entries, oldest first."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(row * streams + own for row, own in self._rows)])

    def enlarge(self, size: int) -> None:
        """Grow the ring to `size` places; existing entries must be moved to its start."""
        self.size, self._head = size, 0
