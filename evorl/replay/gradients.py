"""Gradients computed by actor processes. Axes: P agents, D all parameters of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evorl.envs.episodes import Collected
from evorl.replay.moments import Gather
from evorl.replay.protocols import Population
from evorl.replay.ring import Empty
from evorl.system.console import Stopwatch
from evorl.types import Agent, Batch, Tensors, UpdateResult


class GradientMemory:
    """The gradients and metrics of one update, in memory allocated by `empty`."""

    def __init__(self, sizes: Mapping[str, int], metrics: Sequence[str], agents: int, empty: Empty) -> None:
        """`sizes` are the flat gradient sizes by network; `metrics` names the metrics of the update."""
        self.gradients = {name: empty((size,), torch.float32) for name, size in sizes.items()}
        self.metrics = {name: empty((agents,), torch.float32) for name in metrics}
        self.counts = empty((len(Collected._fields), agents), torch.float64)
        self.behind = empty((1,), torch.int64)
        """Staleness in updates of the parameters when an actor applied the gradient itself."""
        self.number = 0

    def write(self, batch: Batch) -> None:
        """Copy the gradients and metrics of a batch [P, 1]."""
        for name, values in batch.gradients.items():
            self.gradients[name].copy_(values)
        for name, values in self.metrics.items():
            values.copy_(batch.columns[name].squeeze(-1))


@dataclass(frozen=True)
class GradientSettings:
    """Average `gradients` gradients of `steps` steps each per update."""

    steps: int
    gradients: int


class ReceivedGradients:
    """Passes on actors' gradients in arrival order, one at a time or averaged over several."""

    def __init__(
        self, settings: GradientSettings, *, gather: Gather, device: torch.device, stopwatch: Stopwatch
    ) -> None:
        """`gather` stacks an array from every rank that holds the same agents along a new leading axis."""
        self.period = settings.steps * settings.gradients
        self._settings = settings
        self._gather = gather
        self._device = device
        self._stopwatch = stopwatch
        self._waiting: list[Batch] = []
        self._steps = np.zeros(0)
        self._policy: Population

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation with the agents of `policy`, discarding pending gradients."""
        self._policy = policy
        self._waiting, self._steps = [], np.zeros(len(policy.agents))

    def extend(self, slot: GradientMemory) -> None:
        """Copy an actor's gradients to the device."""
        with self._stopwatch("receiving"):
            gradients = {name: values.to(self._device, copy=True) for name, values in slot.gradients.items()}
            columns = {name: values.to(self._device, copy=True) for name, values in slot.metrics.items()}
            self._steps = self._steps + slot.counts[0].numpy()
            self._waiting.append(gradient_batch(gradients, columns))

    def batches(self) -> Iterator[Batch]:
        """Yield the mean gradient once enough have arrived; every rank of the agents contributes equally many."""
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
        """Do nothing: a gradient is used once."""

    def end(self, agents: list[Agent]) -> None:
        """Do nothing: no state outlasts a generation."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Return nothing: no state outlasts a generation."""
        return {}, {}

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Do nothing: no state outlasts a generation."""


def gradient_batch(gradients: Tensors, metrics: Mapping[str, Tensor]) -> Batch:
    """Return a batch [P, 1] that carries gradients by network and metrics [P] instead of transitions."""
    columns = {name: values.unsqueeze(-1) for name, values in metrics.items()}
    ones = torch.ones_like(next(iter(metrics.values())))
    return Batch({}, {}, columns, ones.unsqueeze(-1), ones, all_due=True, gradients=gradients)


def _mean(values: Sequence[Tensors]) -> Tensors:
    if len(values) == 1:
        return values[0]
    return {name: torch.stack([each[name] for each in values]).mean(0) for name in values[0]}
