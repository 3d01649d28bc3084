"""Minibatch indices for the updates on a rollout.

Axes: U updates, P agents, B sequences of a minibatch, N sequences of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from evorl.types import Agent


def parts_of(steps: int, batch_size: ArrayLike, sequences: int) -> NDArray[np.int64]:
    """Return the number of minibatches [P] of `batch_size` [P] steps that a rollout of `steps` steps is split into.

    The count is rounded and lies between 1 and `sequences`.
    """
    return np.clip(np.round(steps / np.asarray(batch_size)), 1, sequences).astype(np.int64)


class Minibatches:
    """Shuffled minibatches: each agent makes `epochs` passes over its rollout, each in a new order.

    Minibatches have about `batch_size` steps, and are as equal as possible where evolution has perturbed the batch size
    to a value that does not divide the rollout. Agents with fewer updates than others skip the last ones.
    """

    def __init__(
        self, agents: Sequence[Agent], steps: int, sequence: int, device: torch.device, copies: int = 1
    ) -> None:
        """`steps` is the length of one agent's rollout on this rank, over all environments, in sequences of `sequence`.

        Minibatches of `batch_size` steps are split evenly over `copies` ranks.
        """
        self._sequences = steps // sequence
        size = np.array([agent.hyperparameters.get("batch_size", steps * copies) for agent in agents]) / copies
        epochs = np.array([max(1, round(agent.hyperparameters.get("epochs", 1))) for agent in agents])
        parts = parts_of(steps, size, self._sequences)
        updates = np.arange(int((epochs * parts).max()))[:, None]
        place = updates % parts
        first, last = (place * self._sequences // parts, (place + 1) * self._sequences // parts)
        width = int((last - first).max())
        self.updates = len(updates)
        self._epochs = int(epochs.max())
        within = first[..., None] + np.arange(width)
        counted = within < last[..., None]
        epoch = np.minimum(updates // parts, self._epochs - 1)
        rows = epoch * len(agents) + np.arange(len(agents))
        position = rows[..., None] * self._sequences + np.minimum(within, self._sequences - 1)
        self._position = torch.from_numpy(position).to(device)
        self.counted: Tensor = torch.from_numpy(counted).to(device)
        """Mask [U, P, B] of the drawn sequences that count; the rest is padding."""
        self.all_due: list[bool] = np.all(updates < epochs * parts, axis=1).tolist()
        """Whether each update applies to all agents."""
        self.due: Tensor = torch.from_numpy((updates < epochs * parts).astype(np.float32)).to(device)
        """1 for the agents that an update applies to, else 0 [U, P]."""
        self.later: Tensor = torch.from_numpy((updates + 1 < epochs * parts).astype(np.float32)).to(device)
        """1 for the agents with another update after this one, else 0 [U, P]."""

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return shuffled sequence indices [U, P, B] for all updates."""
        agents = self.due.shape[1]
        order = torch.rand(
            (self._epochs, agents, self._sequences), generator=generator, device=generator.device
        ).argsort(-1)
        return order.flatten()[self._position]


def check_rollout(steps: int, num_envs: int, sequence: int, batch_size: float | None, copies: int = 1) -> str | None:
    """Return an error message naming the key that does not divide, or None; `copies` ranks share steps and batches."""
    if steps % copies:
        return (
            f"algorithm.rollout_steps: {steps} steps cannot be shared by {copies} ranks, as algorithm.split_batches "
            f"asks; take a multiple of {copies * sequence}"
        )
    share, among = steps // copies, "" if copies == 1 else f", {steps // copies} on each of {copies} ranks"
    if share % sequence:
        return (
            f"algorithm.sequence_length: {sequence} does not divide algorithm.rollout_steps {steps}{among}; "
            f"take one of {_nearest(_divisors(share), sequence)}"
        )
    whole = share * num_envs
    if batch_size is not None and (
        batch_size % copies or whole % (batch_size / copies) or batch_size / copies % sequence
    ):
        parts = [size for size in _divisors(whole) if size % sequence == 0]
        fitting = _nearest([size * copies for size in parts], batch_size)
        return (
            f"algorithm.batch_size: a rollout of {steps} steps{among} in {num_envs} environments, in sequences of "
            f"{sequence}, does not divide into minibatches of {batch_size:.0f}; take one of {fitting}"
        )
    return None


def _nearest(sizes: list[int], wanted: float) -> list[int]:
    """Return up to 12 sizes nearest to the wanted one, sorted."""
    return sorted(sorted(sizes, key=lambda size: abs(size - wanted))[:12])


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
