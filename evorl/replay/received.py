"""Experience made by actor processes: rollouts, or the gradients that the actors computed.

Axes: T steps of a rollout, P agents, E environments, S = k * E sequences of k rollouts, B = T * S steps of a batch; D
all parameters of a network; K numbers for each of N recurrent units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evorl.envs.episodes import Collected
from evorl.envs.spaces import ObservationSpecs, as_numbers
from evorl.replay.experience import Experience, Population
from evorl.replay.rollouts import Minibatches, RolloutMemory
from evorl.replay.statistics import Gather, RolloutStatistics
from evorl.replay.storage import Empty
from evorl.seeding import numpy_generator, torch_generator
from evorl.system.stopwatch import Stopwatch
from evorl.types import Batch, RecurrentInput, Tensors

TINY = 1e-12
"""Divisor in place of a zero sum of weights."""
LEARNED = ("reward", "terminated", "truncated", "valid")
"""Columns of each step used for learning, besides the policy's own outputs."""


@dataclass(frozen=True)
class ReceivedSettings:
    """A batch is `rollouts` rollouts of `steps` steps, used for `passes` passes, each in `minibatches` parts.

    Agents normalise the `normalized` parts. Each batch adds `replayed` older rollouts, drawn by `seed` and `rank` from
    the previous `kept` ones.
    """

    steps: int
    rollouts: int
    passes: int
    normalized: tuple[str, ...]
    minibatches: int = 1
    replayed: int = 0
    kept: int = 0
    seed: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Received:
    """A rollout on the learner's device: parts and columns [P, T, E, ...], and the initial state [P, E, K, N]."""

    observation: Tensors
    columns: Tensors
    state: Tensor | None


class ReceivedRollouts(Experience):
    """Joins actors' rollouts into batches, each used once or for several passes, whole or in shuffled minibatches.

    Older rollouts of the same agents may be replayed beside them (arXiv 1802.01561, section 5.2.2). The bootstrap
    values after a rollout, or after a truncated step in it, come from the learner's policy when the rollout arrives.
    """

    def __init__(
        self,
        settings: ReceivedSettings,
        parts: ObservationSpecs,
        *,
        gather: Gather,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        super().__init__(settings.steps * settings.rollouts, gather=gather, device=device, stopwatch=stopwatch)
        self._settings = settings
        self._parts = parts
        self._statistics = RolloutStatistics(gather, stopwatch)
        self._waiting: list[Received] = []
        self._kept: deque[Received] = deque(maxlen=settings.kept)
        self._rng: np.random.Generator
        self._generator: torch.Generator

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation with the agents of `policy`, discarding other agents' rollouts."""
        super().begin(policy, generation)
        self._waiting = []
        self._kept.clear()
        seed, rank = self._settings.seed, self._settings.rank
        self._rng = numpy_generator(seed, generation=generation, rank=rank, purpose="replayed rollouts")
        self._generator = torch_generator(
            seed, generation=generation, rank=rank, purpose="minibatches", device=self._device
        )

    def extend(self, slot: RolloutMemory) -> None:
        """Copy an actor's rollout to the device."""
        with self._stopwatch("receiving"):
            names = [name for name in slot.layout.fields if name not in (*LEARNED, "action", "started")]
            state = self._on_device(slot.state(0))
            more = () if state is None else ("started",)
            columns = {name: value.to(self._device) for name, value in slot.columns([*names, *LEARNED, *more]).items()}
            columns["next_value"] = self._next_values(slot, columns["reward"])
            observation = {name: value.to(self._device) for name, value in slot.observation().items()}
            self._waiting.append(Received(observation, columns, state))

    def batches(self) -> Iterator[Batch]:
        """Yield a batch once enough rollouts have arrived; every rank of the same agents yields equally many."""
        if len(self._waiting) < self._settings.rollouts:
            return
        waiting, self._waiting = self._waiting, []
        steps = sum(each.columns["valid"].sum((1, 2)).cpu().numpy().astype(np.float64) for each in waiting)
        with self._stopwatch("communication"):
            steps = np.asarray(self._gather(np.asarray(steps)).sum(0))
        with self._stopwatch("sampling"):
            learned = [*waiting, *self._replayed()]
            self._kept.extend(waiting)
            observation = _joined([each.observation for each in learned])
            columns = _joined([each.columns for each in learned])
            valid = columns["valid"]
            states = [each.state for each in learned if each.state is not None]
            recurrent = RecurrentInput(torch.cat(states, 1), columns.pop("started")) if states else None
            weight = valid.flatten(1).float()
            weight /= weight.sum(-1, keepdim=True).clamp(min=1)
            due = torch.ones(len(weight), device=self._device)
            batch = Batch(_flat(observation), {}, _flat(columns), weight, due, recurrent, all_due=True)
            batch = replace(batch, columns={**batch.columns, **self._policy.batch_targets(batch)})
        yield from self._parts_of(batch)
        self._policy.acted(steps)
        # Replayed rollouts are already in the statistics.
        new = sum(each.columns["valid"].shape[2] for each in waiting)
        self._update_observation_stats(
            {name: part[:, :, :new] for name, part in observation.items()}, valid[:, :, :new]
        )

    def _parts_of(self, batch: Batch) -> Iterator[Batch]:
        """The batch in each pass, or its minibatches."""
        passes, parts = self._settings.passes, self._settings.minibatches
        if parts == 1:
            yield from [batch] * passes
            return
        agents, rows = batch.weight.shape
        sequences = rows if batch.recurrent is None else batch.recurrent.state.shape[1]
        minibatches = Minibatches(np.full(agents, passes), np.full(agents, parts), sequences, self._device)
        for index, counted in zip(minibatches.draw(self._generator), minibatches.counted, strict=True):
            with self._stopwatch("sampling"):
                part = minibatch(batch, index, counted)
            yield part

    def _replayed(self) -> list[Received]:
        """Draw older rollouts to replay, or none before the first batch."""
        count = self._settings.replayed if self._kept else 0
        return [self._kept[index] for index in self._rng.integers(len(self._kept) or 1, size=count)]

    def _next_values(self, slot: RolloutMemory, like: Tensor) -> Tensor:
        """Bootstrap values [P, T, E] of next observations at truncated and last steps; others are unused."""
        values = torch.zeros_like(like)
        for step in slot.ends():
            following = {name: part.to(self._device) for name, part in slot.next_observation(step).items()}
            values[:, step] = self._policy.value(following, self._on_device(slot.state(step + 1)))
        return values

    def _update_observation_stats(self, observation: Tensors, valid: Tensor) -> None:
        """Update the observation statistics with the observations just learned from."""
        for part in self._settings.normalized:
            seen = as_numbers(observation[part], self._parts[part]).transpose(0, 1)
            samples = seen.reshape(*seen.shape[:3], -1)
            self._policy.update_observation_stats(part, self._statistics.moments(samples, valid.transpose(0, 1)))

    def _on_device(self, state: Tensor | None) -> Tensor | None:
        return None if state is None else state.to(self._device)


def minibatch(batch: Batch, index: Tensor, counted: Tensor) -> Batch:
    """The sequences at `index` [P, S'] of each agent's S, or steps if it is not recurrent; those `counted` have weight.

    A batch of sequences is time-major in B.
    """
    agents, rows = batch.weight.shape
    recurrent, sequences = batch.recurrent, rows if batch.recurrent is None else batch.recurrent.state.shape[1]
    agent = torch.arange(agents, device=index.device)
    within = torch.arange(0, rows, sequences, device=index.device).view(-1, 1) + index.unsqueeze(1)
    place = (within + agent.view(-1, 1, 1) * rows).flatten()

    def drawn(values: Tensor) -> Tensor:
        return values.flatten(0, 1).index_select(0, place).view(agents, -1, *values.shape[2:])

    weight = drawn(batch.weight) * counted.unsqueeze(1).expand_as(within).flatten(1)
    if recurrent is not None:
        among = agent.unsqueeze(-1)
        recurrent = RecurrentInput(recurrent.state[among, index], drawn(recurrent.started.flatten(1)).view_as(within))
    return replace(
        batch,
        observation={name: drawn(values) for name, values in batch.observation.items()},
        columns={name: drawn(values) for name, values in batch.columns.items()},
        weight=weight / weight.sum(-1, keepdim=True).clamp(min=TINY),
        recurrent=recurrent,
    )


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate rollouts [P, T, E, ...] to [P, T, S, ...]."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def _flat(values: Tensors) -> Tensors:
    """Flatten values [P, T, S, ...] to [P, B, ...], time-major."""
    return {name: value.flatten(1, 2) for name, value in values.items()}


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


class ReceivedGradients(Experience):
    """Passes on actors' gradients in arrival order, one at a time or averaged over several."""

    def __init__(
        self, settings: GradientSettings, *, gather: Gather, device: torch.device, stopwatch: Stopwatch
    ) -> None:
        super().__init__(settings.steps * settings.gradients, gather=gather, device=device, stopwatch=stopwatch)
        self._settings = settings
        self._waiting: list[Batch] = []
        self._steps = np.zeros(0)

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation with the agents of `policy`, discarding pending gradients."""
        super().begin(policy, generation)
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
            steps = np.asarray(self._gather(self._steps).sum(0))
        self._steps = np.zeros_like(self._steps)
        first = waiting[0]
        columns = _mean([batch.columns for batch in waiting])
        yield replace(first, columns=columns, gradients=_mean([batch.gradients for batch in waiting]))
        self._policy.acted(steps)


def gradient_batch(gradients: Tensors, metrics: Mapping[str, Tensor]) -> Batch:
    """A batch [P, 1] that carries gradients by network and metrics [P] instead of transitions."""
    columns = {name: values.unsqueeze(-1) for name, values in metrics.items()}
    ones = torch.ones_like(next(iter(metrics.values())))
    return Batch({}, {}, columns, ones.unsqueeze(-1), ones, all_due=True, gradients=gradients)


def _mean(values: Sequence[Tensors]) -> Tensors:
    if len(values) == 1:
        return values[0]
    return {name: torch.stack([each[name] for each in values]).mean(0) for name in values[0]}
