"""The base classes of actor-critics that learn from rollouts of actor processes: A3C, IMPALA and APPO.

Axes: T steps of a rollout, P agents, E environments, S sequences, B = T * S steps of a batch.
"""

from __future__ import annotations

from torch import Tensor

from evorl.algorithms.a2c import A2C
from evorl.distributed import Placement
from evorl.replay import Experience
from evorl.replay.received import ReceivedRollouts
from evorl.replay.statistics import normalized
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Batch


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

    def normalized_advantage(self, advantage: Tensor, batch: Batch) -> Tensor:
        """Advantages [P, B], normalised over the batch if that is configured."""
        return normalized(advantage, batch.weight) if self.settings.normalize_advantage else advantage


def time_major(values: Tensor, steps: int) -> Tensor:
    """Reshape values [P, B] of rollouts of T = `steps` to [T, P, S]."""
    by_time: Tensor = values.unflatten(1, (steps, -1))
    return by_time.transpose(0, 1)


def flattened(values: Tensor) -> Tensor:
    """Reshape values [T, P, S] to [P, B]."""
    return values.transpose(0, 1).flatten(1, 2)
