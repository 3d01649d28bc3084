"""The base classes of actor-critics that learn from rollouts of actor processes: A3C, IMPALA and APPO.

Axes: T steps of a rollout, P agents, E environments, S sequences, B = T * S steps of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from evorl.algorithms.a2c import A2C
from evorl.distributed import Placement
from evorl.replay import Experience
from evorl.replay.received import ReceivedRollouts
from evorl.replay.statistics import normalized
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Batch, Segment


class Asynchronous(A2C):
    """A2C on rollouts collected by actor processes."""

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        return ReceivedRollouts(
            self.config,
            normalized=self.normalized_parts,
            rank=placement.ranks.rank,
            gather=placement.gather_copies,
            device=placement.ranks.device,
            stopwatch=stopwatch,
        )

    def in_time(self, values: Tensor) -> Tensor:
        """Reshape values [P, B] of rollouts to [T, P, S]."""
        by_time: Tensor = values.unflatten(1, (self.settings.rollout_steps, -1))
        return by_time.transpose(0, 1)

    def segment(self, columns: Mapping[str, Tensor]) -> Segment:
        """The rollouts [T, P, S] of a batch."""
        return Segment(*(self.in_time(columns[name]) for name in Segment._fields))

    def normalized_advantage(self, advantage: Tensor, batch: Batch) -> Tensor:
        """Advantages [P, B], normalised over the batch if that is configured."""
        return normalized(advantage, batch.weight) if self.settings.normalize_advantage else advantage


def flattened(values: Tensor) -> Tensor:
    """Reshape values [T, P, S] to [P, B]."""
    return values.transpose(0, 1).flatten(1, 2)
