"""Priority sum trees. Axes: P agents, N leaves of each, K leaves at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class PriorityTree:
    """One sum tree per agent (arXiv 1511.05952, appendix B), vectorised over agents.

    Each level is one array [P, nodes] with twice as many nodes as the next, so that node i of the flattened array has
    the children 2 i and 2 i + 1 in the level below, for any agent. Sums are recomputed, never incremented, so rounding
    errors do not accumulate. A leaf of 0 is never drawn.
    """

    def __init__(self, agents: int, leaves: int) -> None:
        depth = max(1, (leaves - 1).bit_length())
        self.levels = [np.zeros((agents, 1 << level)) for level in range(depth, -1, -1)]
        """The leaf priorities, then each level of sums up to the root."""
        self._first = np.arange(agents)[:, None] << depth
        self._minimum = np.full(agents, np.inf)
        self._lost = np.zeros(agents, dtype=np.bool_)

    @staticmethod
    def memory(agents: int, leaves: int) -> int:
        """Return the size of the trees in bytes."""
        return agents * 16 << max(1, (leaves - 1).bit_length())

    @property
    def leaves(self) -> Floats:
        """The priorities [P, N], zero-padded to a power of two."""
        return self.levels[0]

    @property
    def total(self) -> Floats:
        """The sum [P] of each agent's priorities."""
        return self.levels[-1][:, 0]

    @property
    def minimum(self) -> Floats:
        """The smallest positive priority [P]; infinite if there is none.

        It is searched for only after the smallest was overwritten or forgotten, which is rare because it is seldom
        drawn: a second tree would double the time of every change.
        """
        if self._lost.any():
            leaves = self.leaves[self._lost]
            self._minimum[self._lost] = np.min(leaves, 1, where=leaves > 0, initial=np.inf)
            self._lost[:] = False
        return self._minimum

    def set(self, leaf: Integers, priority: Floats, where: NDArray[np.bool_]) -> None:
        """Set leaves [P, K] to positive priorities [P, K] `where` [P, K]; the last of duplicate leaves counts."""
        places = leaf + self._first
        flat, node, values = self.leaves.reshape(-1), places.reshape(-1), priority.reshape(-1)
        if not where.all():
            node, values = places[where], priority[where]
        replaced = ((flat.take(places) == self._minimum[:, None]) & where).any(1)
        flat[node] = values
        self._note(np.min(flat.take(places), 1, where=where, initial=np.inf), replaced)
        for below, here in zip(self.levels, self.levels[1:], strict=False):
            if here.size <= len(node):
                np.add(below[:, ::2], below[:, 1::2], out=here)
                continue
            node = node >> 1
            pairs = below.reshape(-1, 2).take(node, 0)
            here.reshape(-1)[node] = pairs[:, 0] + pairs[:, 1]

    def fill(self, start: int, stop: int, priority: Floats | float) -> None:
        """Set leaves `start` to `stop` of all agents to priorities [P, stop - start]; 0 removes a leaf."""
        leaves = self.leaves[:, start:stop]
        replaced = (leaves == self._minimum[:, None]).any(1)
        leaves[:] = priority
        self._note(np.min(leaves, 1, where=leaves > 0, initial=np.inf), replaced)
        for below, here in zip(self.levels, self.levels[1:], strict=False):
            start, stop = start // 2, (stop + 1) // 2
            children = below[:, 2 * start : 2 * stop]
            np.add(children[:, ::2], children[:, 1::2], out=here[:, start:stop])

    def find(self, fraction: Floats) -> tuple[Integers, Floats]:
        """Return the leaves [P, K] at `fraction` [P, K] in [0, 1) of each agent's total, and their priorities."""
        rest = fraction * self.total[:, None]
        node = np.empty(fraction.shape, dtype=np.int64)
        node[:] = np.arange(len(fraction))[:, None]
        for level in self.levels[-2::-1]:
            node <<= 1
            left = level.reshape(-1).take(node)
            right = rest >= left
            left *= right
            rest -= left
            node += right
        priority = self.leaves.reshape(-1).take(node)
        node -= self._first
        # Rounding may overshoot by one leaf, onto a leaf of priority 0.
        for agent, at in zip(*np.nonzero((priority == 0) & (self.total > 0)[:, None]), strict=True):
            node[agent, at] = np.flatnonzero(self.leaves[agent, : node[agent, at]])[-1]
            priority[agent, at] = self.leaves[agent, node[agent, at]]
        return node, priority

    def take_over(self, sources: Integers) -> None:
        """Reassign priorities: each agent copies the tree at place `sources` [P], or starts empty where that is -1."""
        self._minimum = np.where(sources < 0, np.inf, self.minimum[sources])
        self._lost = np.zeros(len(sources), dtype=np.bool_)
        self._first = np.arange(len(sources))[:, None] << (len(self.levels) - 1)
        for level, values in enumerate(self.levels):
            self.levels[level] = values[sources]
            self.levels[level][sources < 0] = 0.0

    def _note(self, smallest: Floats, replaced: NDArray[np.bool_]) -> None:
        """Update the minimum from the smallest new priority [P]; `replaced` marks agents that lost their minimum."""
        self._lost = (self._lost | replaced) & (smallest > self._minimum)
        self._minimum = np.minimum(self._minimum, smallest)
