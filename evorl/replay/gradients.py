"""Gradients that actor processes have computed, and their experience. Axes: P agents, D all values of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evorl.replay import Gather, Population
from evorl.replay.ring import Empty
from evorl.replay.segment import COUNTS
from evorl.system.timing import Stopwatch
from evorl.types import Agent, Batch, Tensors, UpdateResult


class GradientMemory:
    """The gradients of one update, and what is reported of them, in memory that `empty` gives."""

    def __init__(self, sizes: Mapping[str, int], metrics: Sequence[str], agents: int, empty: Empty) -> None:
        """`sizes` are those of the flat gradients of each network; `metrics` are what is reported of the update."""
        self.gradients = {name: empty((size,), torch.float32) for name, size in sizes.items()}
        self.metrics = {name: empty((agents,), torch.float32) for name in metrics}
        self.counts = empty((len(COUNTS), agents), torch.float64)
        self.behind = empty((1,), torch.int64)
        """The updates by which the parameters were behind when the gradient was applied, where an actor applied it."""
        self.staleness = self.number = 0

    def write(self, batch: Batch) -> None:
        """Keep what a batch [P, 1] of gradients holds."""
        for name, values in batch.gradients.items():
            self.gradients[name].copy_(values)
        for name, values in self.metrics.items():
            values.copy_(batch.columns[name].squeeze(-1))


@dataclass(frozen=True)
class GradientSettings:
    """Update with the mean of so many `gradients`, of `steps` each; perhaps `weighed` by their staleness."""

    steps: int
    gradients: int
    weighed: bool


class ReceivedGradients:
    """Hands on the gradients of actors, each or several as one, in the order in which they arrive."""

    def __init__(
        self, settings: GradientSettings, *, gather: Gather, device: torch.device, stopwatch: Stopwatch
    ) -> None:
        """`gather` gives the numbers of every rank that holds the same agents, as one array with a leading axis."""
        self.period = settings.steps * settings.gradients
        self._settings = settings
        self._gather = gather
        self._device = device
        self._stopwatch = stopwatch
        self._waiting: list[Batch] = []
        self._steps = np.zeros(0)
        self._policy: Population

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation of these agents."""
        self._policy = policy
        self._waiting, self._steps = [], np.zeros(len(policy.agents))

    def extend(self, slot: GradientMemory) -> None:
        """Take a copy of what an actor computed."""
        weight = staleness_weight(slot.staleness) if self._settings.weighed else 1.0
        with self._stopwatch("receiving"):
            gradients = {name: values.to(self._device) * weight for name, values in slot.gradients.items()}
            columns = {name: values.to(self._device, copy=True) for name, values in slot.metrics.items()}
            self._steps = self._steps + slot.counts[0].numpy()
            self._waiting.append(gradient_batch(gradients, columns))

    def batches(self) -> Iterator[Batch]:
        """Yield the mean of as many gradients as make an update; every rank of the agents gives equally many."""
        if len(self._waiting) < self._settings.gradients:
            return
        waiting, self._waiting = self._waiting, []
        with self._stopwatch("communication"):
            self._policy.acted(np.asarray(self._gather(self._steps).sum(0)))
        self._steps = np.zeros_like(self._steps)
        first = waiting[0]
        columns = _mean([batch.columns for batch in waiting])
        yield replace(first, columns=columns, gradients=_mean([batch.gradients for batch in waiting]))

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Nothing is learned from a gradient again."""

    def end(self, agents: list[Agent]) -> None:
        """Nothing outlasts a generation."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Nothing outlasts a generation."""
        return {}, {}

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Nothing outlasts a generation."""


def staleness_weight(staleness: int) -> float:
    """Return the weight of a gradient whose parameters are so many updates behind."""
    return 1 / (1 + staleness)


def gradient_batch(gradients: Tensors, metrics: Mapping[str, Tensor]) -> Batch:
    """Return a batch [P, 1] that brings gradients, by networks, and metrics [P] instead of experience."""
    columns = {name: values.unsqueeze(-1) for name, values in metrics.items()}
    ones = torch.ones_like(next(iter(metrics.values())))
    return Batch({}, {}, columns, ones.unsqueeze(-1), ones, all_due=True, gradients=gradients)


def _mean(values: Sequence[Tensors]) -> Tensors:
    if len(values) == 1:
        return values[0]
    return {name: torch.stack([each[name] for each in values]).mean(0) for name in values[0]}
