"""The base class of actor-critics that learn from actor processes: settings, pace and experience.

The losses are those of A2C and its relatives. Axes: T steps of a rollout, P agents, S sequences, B = T * S steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from evorl.algorithms.a2c import A2C, A2CSettings
from evorl.config.fields import Size
from evorl.distributed import Placement
from evorl.replay import Experience, Pace
from evorl.replay.received import ReceivedRollouts, ReceivedSettings
from evorl.replay.statistics import normalized
from evorl.system.console import Stopwatch
from evorl.types import Batch, Tensors


class AsynchronousSettings(A2CSettings):
    rollout_steps: Size = 32
    """Steps of each environment that an actor makes with one set of parameters and sends together."""
    rollouts: Annotated[int, Field(ge=1, le=4096)] = 1
    """Rollouts that make a batch, on each rank, whichever of its actors they are from."""
    passes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Updates with each batch."""
    sequence_length: Size | None = None  # type: ignore[assignment]
    """Gradients of recurrent agents flow through whole rollouts, so there is nothing to set here."""
    normalize_rewards: Literal[False] = False
    split_batches: Literal[False] = False

    sends: ClassVar[str | None] = "rollouts"

    @property
    def sent_steps(self) -> int:
        """Return the steps of each environment in one message of an actor."""
        return self.rollout_steps

    @model_validator(mode="after")
    def _has_whole_sequences(self) -> Self:
        if self.sequence_length not in (None, self.rollout_steps):
            raise ValueError("sequence_length: actors send whole rollouts; leave it out, or set rollout_steps")
        return self


class Asynchronous(A2C):
    """A2C on rollouts collected by actor processes."""

    def pace(self, copies: int) -> Pace:
        """Return the batch size and update-to-data ratio of a new agent."""
        settings: AsynchronousSettings = self.settings
        batch = settings.rollouts * settings.rollout_steps * self.config.environment.num_envs * copies
        return Pace(batch, updates=float(settings.passes), steps=float(batch))

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        """Return the buffer that joins the rollouts this rank receives into batches."""
        return ReceivedRollouts(
            self.received_settings(placement),
            self.interface.parts,
            gather=placement.gather_copies,
            device=placement.ranks.device,
            stopwatch=stopwatch,
        )

    def received_settings(self, placement: Placement) -> ReceivedSettings:
        """Return how many received rollouts make a batch on this rank, and how many updates are made with each."""
        settings: AsynchronousSettings = self.settings
        return ReceivedSettings(settings.rollout_steps, settings.rollouts, settings.passes, self._normalized)

    def with_columns(self, batch: Batch, found: Tensors) -> Batch:
        """Return the batch with `found` as further columns [P, B]; advantages are normalised if that is configured."""
        if self.settings.normalize_advantage:
            found = {**found, "advantage": normalized(found["advantage"], batch.weight)}
        return replace(batch, columns={**batch.columns, **found})


def in_time(values: Tensor, steps: int) -> Tensor:
    """Reshape values [P, B] of rollouts of T = `steps` to [T, P, S]."""
    by_time: Tensor = values.unflatten(1, (steps, -1))
    return by_time.transpose(0, 1)


def in_batch(values: Tensor) -> Tensor:
    """Reshape values [T, P, S] to [P, B]."""
    return values.transpose(0, 1).flatten(1, 2)
