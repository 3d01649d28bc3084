"""The assignment of agents to ranks. Axes: P agents, D all values of a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evorl.distributed.ranks import Ranks


@dataclass(frozen=True)
class Placement:
    """The agents that a rank holds, and the collectives over numbers per agent.

    `replicated`: every rank holds all P agents. `sharded`: rank r holds the r-th part of them, alone; P must be a
    multiple of the number of ranks.
    """

    ranks: Ranks
    kind: Literal["replicated", "sharded"]
    agents: int

    @property
    def is_sharded(self) -> bool:
        return self.kind == "sharded"

    @property
    def local_size(self) -> int:
        """Return the number of agents that this rank holds."""
        return self.agents // self.ranks.size if self.is_sharded else self.agents

    @property
    def copies(self) -> int:
        """Return the number of ranks that hold each agent."""
        return 1 if self.is_sharded else self.ranks.size

    @property
    def local(self) -> slice:
        """Return the agents that this rank holds."""
        if not self.is_sharded:
            return slice(0, self.agents)
        share = self.agents // self.ranks.size
        return slice(self.ranks.rank * share, (self.ranks.rank + 1) * share)

    def average_(self, flat: Tensor) -> None:
        """Average a gradient over the ranks that hold the same agents."""
        if not self.is_sharded:
            self.ranks.average_(flat)

    def gather_copies(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the numbers of every rank that holds the same agents, [copies, ...]."""
        return numbers[None] if self.is_sharded else self.ranks.gather(numbers)

    def total(self, numbers: NDArray[np.float64], what: str) -> NDArray[np.float64]:
        """Return the sums over the ranks that hold the same agent: [..., local agents] -> [..., P]."""
        everyones = self.ranks.gather(numbers, what)
        return np.concatenate(list(everyones), axis=-1) if self.is_sharded else everyones.sum(0)
