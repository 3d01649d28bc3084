"""Experience made by actor processes: rollouts, or the gradients that the actors computed.

Axes: T steps of a rollout, P agents, E environments, S = k * E sequences of k rollouts, B = T * S steps of a batch; D
all parameters of a network; K numbers for each of N recurrent units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evorl.config import AnyConfig
from evorl.envs.episodes import Collected
from evorl.envs.spaces import ObservationSpecs
from evorl.replay.experience import ActingAgents, Experience
from evorl.replay.observations import ObservationStatistics
from evorl.replay.rollout_memory import RolloutMemory
from evorl.replay.rollouts import Minibatches, cut
from evorl.replay.statistics import Gather, Moments
from evorl.replay.storage import Empty
from evorl.seeding import torch_generator
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Batch, RecurrentInput
from evorl.types.tensors import Tensors

LEARNED = ("reward", "terminated", "truncated", "valid")
"""Columns of each step used for learning, besides the policy's own outputs."""


@dataclass(frozen=True)
class Received:
    """A rollout on the learner's device: parts and columns [P, T, E, ...], and the initial state [P, E, K, N]."""

    observation: Tensors
    columns: Tensors
    state: Tensor | None


class ReceivedRollouts(Experience):
    """Joins actors' rollouts into batches, each used once or, in APPO, for several passes of shuffled minibatches.

    The bootstrap values after a rollout, or after a truncated step in it, come from the learner's policy when the
    rollout arrives.
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        normalized: ObservationSpecs,
        rank: int,
        gather: Gather,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        """A batch is the algorithm's `rollouts` rollouts; in APPO it is used for `passes` passes of `minibatches`.

        The `normalized` parts of observations are normalised.
        """
        settings = config.algorithm
        steps = settings.rollout_steps * settings.rollouts
        super().__init__(steps, gather=gather, device=device, stopwatch=stopwatch)
        self._settings = settings
        self._passes, self._minibatches = (getattr(settings, name, 1) for name in ("passes", "minibatches"))
        self._seed, self._rank = config.seed, rank
        self._observations = ObservationStatistics(normalized, gather, stopwatch)
        self._waiting: list[Received] = []
        self._generator: torch.Generator

    def begin(self, policy: ActingAgents, generation: int) -> None:
        """Start a generation with the agents of `policy`, discarding other agents' rollouts."""
        super().begin(policy, generation)
        self._observations.begin(policy)
        self._waiting = []
        self._generator = torch_generator(
            self._seed, generation=generation, rank=self._rank, purpose="minibatches", device=self._device
        )

    def extend(self, message: RolloutMemory) -> None:
        with self._stopwatch("receiving"):
            names = [name for name in message.layout.fields if name not in (*LEARNED, "action", "started")]
            state = self._on_device(message.state(0))
            names += [*LEARNED, *(() if state is None else ("started",))]
            columns = {name: value.to(self._device) for name, value in message.columns(names).items()}
            columns["next_value"] = self._next_values(message, columns["reward"])
            observation = {name: value.to(self._device) for name, value in message.observation().items()}
            self._waiting.append(Received(observation, columns, state))

    def take_batches(self) -> Iterator[Batch]:
        """Yield a batch once enough rollouts have arrived; every rank of the same agents yields equally many."""
        if len(self._waiting) < self._settings.rollouts:
            return
        waiting, self._waiting = self._waiting, []
        steps = sum(rollout.columns["valid"].sum((1, 2)).cpu().numpy().astype(np.float64) for rollout in waiting)
        with self._stopwatch("communication"):
            steps = np.asarray(self._gather(np.asarray(steps)).sum(0))
        with self._stopwatch("sampling"):
            observation = _joined([rollout.observation for rollout in waiting])
            columns = _joined([rollout.columns for rollout in waiting])
            valid = columns["valid"]
            states = [rollout.state for rollout in waiting if rollout.state is not None]
            recurrent = RecurrentInput(torch.cat(states, 1), columns.pop("started")) if states else None
            weight = valid.flatten(1).float()
            weight /= weight.sum(-1, keepdim=True).clamp(min=1)
            due = torch.ones(len(weight), device=self._device)
            batch = Batch(_flat(observation), {}, _flat(columns), weight, due, recurrent, all_due=True)
            batch = replace(batch, columns={**batch.columns, **self._policy.batch_targets(batch)})
        yield from self._parts_of(batch)
        self._policy.acted(steps)
        self._observations.merge(observation, valid)

    def _parts_of(self, batch: Batch) -> Iterator[Batch]:
        passes, parts = self._passes, self._minibatches
        if parts == 1:
            yield from [batch] * passes
            return
        agents, rows = batch.weight.shape
        sequences = rows if batch.recurrent is None else batch.recurrent.state.shape[1]
        minibatches = Minibatches(np.full(agents, passes), np.full(agents, parts), sequences, self._device)
        index = minibatches.draw(self._generator)
        for update in range(passes * parts):
            one = slice(update, update + 1)
            with self._stopwatch("sampling"):
                (part,) = cut(batch, index[one], minibatches.in_batch[one]).unbound([True])
            yield part

    def _next_values(self, message: RolloutMemory, like: Tensor) -> Tensor:
        """Bootstrap values [P, T, E] of next observations at truncated and last steps; others are unused."""
        values = torch.zeros_like(like)
        for step in message.ends():
            following = {name: part.to(self._device) for name, part in message.next_observation(step).items()}
            values[:, step] = self._policy.value(following, self._on_device(message.state(step + 1)))
        return values

    def _on_device(self, state: Tensor | None) -> Tensor | None:
        return None if state is None else state.to(self._device)


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate rollouts [P, T, E, ...] to [P, T, S, ...]."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def _flat(values: Tensors) -> Tensors:
    """Flatten values [P, T, S, ...] to [P, B, ...], time-major."""
    return {name: value.flatten(1, 2) for name, value in values.items()}


class GradientMemory:
    """The gradients and metrics of one update, and the moments of its observations, in memory allocated by `empty`."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        metrics: Sequence[str],
        normalized: ObservationSpecs,
        agents: int,
        empty: Empty,
    ) -> None:
        """`sizes` are the flat gradient sizes by network; `metrics` names the metrics of the update.

        `normalized` are the parts of observations that are normalised.
        """
        self.gradients = {name: empty((size,), torch.float32) for name, size in sizes.items()}
        self.metrics = {name: empty((agents,), torch.float32) for name in metrics}
        self.moments = {name: empty((agents, 1 + 2 * part.width), torch.float64) for name, part in normalized.items()}
        """Packed moments [P, 1 + 2 D] of each part."""
        self.counts = empty((len(Collected._fields), agents), torch.float64)
        """The actor's counters of each agent [C, P], in the order of `Collected`."""
        self.behind = empty((1,), torch.int64)
        """Staleness in updates of the parameters when an actor applied the gradient itself."""
        self.number = 0
        """The message's number within its rank, by which the learner hands it out."""

    def write(self, batch: Batch, observed: Mapping[str, Moments]) -> None:
        """Write a batch of gradients, and the moments of the observations that they are from."""
        for name, values in batch.gradients.items():
            self.gradients[name].copy_(values)
        for name, values in self.metrics.items():
            values.copy_(batch.columns[name].squeeze(-1))
        for name, moments in observed.items():
            self.moments[name].copy_(torch.from_numpy(moments.packed()))


class ReceivedGradients(Experience):
    """Passes on actors' gradients in arrival order, one at a time or averaged over several."""

    def __init__(
        self, steps: int, gradients: int, applied: bool, *, gather: Gather, device: torch.device, stopwatch: Stopwatch
    ) -> None:
        """Average `gradients` gradients of `steps` steps each per update, which the actors may have `applied`."""
        super().__init__(steps * gradients, gather=gather, device=device, stopwatch=stopwatch)
        self._gradients, self._applied = gradients, applied
        self._waiting: list[Batch] = []
        self._observed: dict[str, Moments] = {}
        self._steps = np.zeros(0)

    def begin(self, policy: ActingAgents, generation: int) -> None:
        """Start a generation with the agents of `policy`, discarding pending gradients."""
        super().begin(policy, generation)
        self._waiting, self._observed, self._steps = [], {}, np.zeros(len(policy.agents))

    def extend(self, message: GradientMemory) -> None:
        with self._stopwatch("receiving"):
            gradients = {name: values.to(self._device, copy=True) for name, values in message.gradients.items()}
            columns = {name: values.to(self._device, copy=True) for name, values in message.metrics.items()}
            self._steps = self._steps + message.counts[0].numpy()
            self._waiting.append(gradient_batch(gradients, columns))
            for name, packed in message.moments.items():
                moments = Moments.unpacked(packed.numpy().copy())
                before = self._observed.get(name)
                self._observed[name] = moments if before is None else before.merged(moments)

    def take_batches(self) -> Iterator[Batch]:
        """Yield the mean gradient once enough have arrived; every rank of the agents contributes equally many."""
        if len(self._waiting) < self._gradients:
            return
        waiting, self._waiting = self._waiting, []
        with self._stopwatch("communication"):
            steps = np.asarray(self._gather(self._steps).sum(0))
        self._steps = np.zeros_like(self._steps)
        first = waiting[0]
        columns = _mean([batch.columns for batch in waiting])
        gradients = _mean([batch.gradients for batch in waiting])
        yield replace(first, columns=columns, gradients=gradients, applied=self._applied)
        self._policy.acted(steps)
        for name, moments in self._observed.items():
            with self._stopwatch("communication"):
                of_all = moments.over_ranks(self._gather)
            self._policy.update_observation_stats(name, of_all)
        self._observed = {}


def gradient_batch(gradients: Tensors, metrics: Mapping[str, Tensor]) -> Batch:
    """A batch [P, 1] that carries gradients by network and metrics [P] instead of transitions."""
    columns = {name: values.unsqueeze(-1) for name, values in metrics.items()}
    ones = torch.ones_like(next(iter(metrics.values())))
    return Batch({}, {}, columns, ones.unsqueeze(-1), ones, all_due=True, gradients=gradients)


def _mean(values: Sequence[Tensors]) -> Tensors:
    if len(values) == 1:
        return values[0]
    return {name: torch.stack([tensors[name] for tensors in values]).mean(0) for name in values[0]}
