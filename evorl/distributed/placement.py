"""The assignment of agents to ranks. Axes: P agents, D all parameters of a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evorl.distributed.ranks import Ranks


@dataclass(frozen=True)
class Placement:
    """The agents that a rank holds, and collectives over per-agent numbers.

    `replicated`: every rank holds all P agents (data parallel). `sharded`: rank r alone holds the r-th part of them; P
    must be a multiple of the number of ranks.
    """

    ranks: Ranks
    kind: Literal["replicated", "sharded"]
    agents: int

    @property
    def is_sharded(self) -> bool:
        return self.kind == "sharded"

    @property
    def local_size(self) -> int:
        """The number of agents on this rank."""
        return self.agents // self.ranks.size if self.is_sharded else self.agents

    @property
    def copies(self) -> int:
        """The number of ranks that hold each agent."""
        return 1 if self.is_sharded else self.ranks.size

    @property
    def local(self) -> slice:
        """The slice of agents on this rank."""
        if not self.is_sharded:
            return slice(0, self.agents)
        share = self.agents // self.ranks.size
        return slice(self.ranks.rank * share, (self.ranks.rank + 1) * share)

    def average_(self, flat: Tensor) -> None:
        """Average a flat gradient [D] in place over the ranks that hold the same agents."""
        if not self.is_sharded:
            self.ranks.average_(flat)

    def gather_copies(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """All-gather over the ranks that hold the same agents: [...] -> [copies, ...]."""
        return numbers[None] if self.is_sharded else self.ranks.gather(numbers)

    def total(self, numbers: NDArray[np.float64], what: str) -> NDArray[np.float64]:
        """Sum over the ranks that hold the same agent, and concatenate shards: [..., local agents] -> [..., P]."""
        everyones = self.ranks.gather(numbers, what)
        return np.concatenate(list(everyones), axis=-1) if self.is_sharded else everyones.sum(0)
