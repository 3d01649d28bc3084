"""The base classes of actor-critics that learn from rollouts of actor processes: A3C, IMPALA and APPO.

Axes: T steps of a rollout, P agents, E environments, S sequences, B = T * S steps of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from evorl.algorithms.a2c import A2C, A2CSettings
from evorl.config.fields import HyperparameterRange, Size
from evorl.distributed import Placement
from evorl.replay import Experience, Pace
from evorl.replay.received import ReceivedRollouts
from evorl.replay.statistics import normalized
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Batch


class AsynchronousSettings(A2CSettings):
    """The settings of actor-critics that learn from actor processes."""

    rollout_steps: Size = 32
    """Steps of each environment that an actor takes with one set of parameters and sends together."""
    rollouts: Annotated[int, Field(ge=1, le=4096)] = 1
    """Rollouts in a batch, on each rank, from any of its actors."""
    passes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Epochs over each batch, of one update each."""
    sequence_length: Size | None = None  # type: ignore[assignment]
    """Gradients of recurrent agents flow through whole rollouts, so there is nothing to set here."""
    normalize_rewards: Literal[False] = False
    split_batches: Literal[False] = False

    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=1e-4, max=1e-2),
        "entropy_coefficient": HyperparameterRange(min=1e-3, max=3e-2),
    }
    actor_messages: ClassVar[str | None] = "rollouts"

    @property
    def sent_steps(self) -> int:
        """Steps of each environment in one message of an actor."""
        return self.rollout_steps

    @model_validator(mode="after")
    def _has_whole_sequences(self) -> Self:
        if self.sequence_length not in (None, self.rollout_steps):
            raise ValueError("sequence_length: actors send whole rollouts; leave it out, or set rollout_steps")
        return self


class Asynchronous(A2C):
    """A2C on rollouts collected by actor processes."""

    Settings = AsynchronousSettings

    def pace(self, copies: int) -> Pace:
        """Update-to-data ratio of `passes` updates on each batch of `rollouts`."""
        settings: AsynchronousSettings = self.settings
        batch = settings.rollouts * settings.rollout_steps * self.config.environment.num_envs * copies
        return Pace(batch, updates=float(settings.passes), steps=float(batch))

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        return ReceivedRollouts(
            self.config,
            self.interface.parts,
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
