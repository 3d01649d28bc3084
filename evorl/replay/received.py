"""Experience for algorithms that learn from what actor processes just did.

Axes: T steps of a rollout, P agents, E environments, S = k * E sequences of k rollouts, B = T * S steps of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evorl.envs.spec import ObservationSpecs, as_numbers
from evorl.randomness import numpy_generator
from evorl.replay import Gather, Population
from evorl.replay.rollout_statistics import RolloutStatistics
from evorl.replay.segment import RolloutMemory
from evorl.system.timing import Stopwatch
from evorl.types import Agent, Batch, RecurrentInput, Tensors, UpdateResult

LEARNED = ("reward", "terminated", "truncated", "valid")
"""What of each step is learned from beside what acting gave."""


@dataclass(frozen=True)
class ReceivedSettings:
    """Learn from so many `rollouts` of `steps` at a time, in several `passes`; agents normalise `normalized` parts.

    Each batch has `replayed` rollouts more, drawn by `seed` and `rank` from the last `kept` ones before it.
    """

    steps: int
    rollouts: int
    passes: int
    normalized: tuple[str, ...]
    replayed: int = 0
    kept: int = 0
    seed: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Received:
    """A rollout as it is learned from: parts and columns [P, T, E, ...], and the state [P, E, K, U] before it."""

    observation: Tensors
    columns: Tensors
    state: Tensor | None


class ReceivedRollouts:
    """Joins rollouts that actors made to batches, each of which is learned from once, or in several passes.

    Older rollouts of the same agents may be learned from again beside them (arXiv 1802.01561, section 5.2.2). What
    follows a rollout, or a truncated step in it, is valued by the policy that learns, when the rollout arrives.
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
        """`gather` gives the numbers of every rank that holds the same agents, as one array with a leading axis."""
        self.period = settings.steps * settings.rollouts
        self._settings = settings
        self._parts = parts
        self._gather = gather
        self._device = device
        self._stopwatch = stopwatch
        self._statistics = RolloutStatistics(gather, stopwatch)
        self._waiting: list[Received] = []
        self._kept: deque[Received] = deque(maxlen=settings.kept)
        self._rng: np.random.Generator
        self._policy: Population

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation of these agents; what other agents did is not learned from."""
        self._policy = policy
        self._waiting = []
        self._kept.clear()
        seed, rank = self._settings.seed, self._settings.rank
        self._rng = numpy_generator(seed, generation=generation, rank=rank, purpose="replayed rollouts")
        self._statistics.begin(policy.agents)

    def extend(self, slot: RolloutMemory) -> None:
        """Take a copy of what an actor did."""
        with self._stopwatch("receiving"):
            names = [name for name in slot.layout.fields if name not in (*LEARNED, "action", "started")]
            state = self._on_device(slot.state(0))
            more = () if state is None else ("started",)
            columns = {name: value.to(self._device) for name, value in slot.columns([*names, *LEARNED, *more]).items()}
            columns["next_value"] = self._next_values(slot, columns["reward"])
            observation = {name: value.to(self._device) for name, value in slot.observation().items()}
            self._waiting.append(Received(observation, columns, state))

    def batches(self) -> Iterator[Batch]:
        """Yield the batch of as many rollouts as make one; every rank that holds the same agents gives equally many."""
        if len(self._waiting) < self._settings.rollouts:
            return
        waiting, self._waiting = self._waiting, []
        steps = sum(each.columns["valid"].sum((1, 2)).cpu().numpy().astype(np.float64) for each in waiting)
        with self._stopwatch("communication"):
            self._policy.acted(np.asarray(self._gather(np.asarray(steps)).sum(0)))
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
        for _ in range(self._settings.passes):
            yield batch
        # The older ones have been counted before.
        new = sum(each.columns["valid"].shape[2] for each in waiting)
        self._update_observation_stats(
            {name: part[:, :, :new] for name, part in observation.items()}, valid[:, :, :new]
        )

    def _replayed(self) -> list[Received]:
        """Return older rollouts to learn from again, once there are some."""
        count = self._settings.replayed if self._kept else 0
        return [self._kept[index] for index in self._rng.integers(len(self._kept) or 1, size=count)]

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Nothing of a batch is learned from again."""

    def end(self, agents: list[Agent]) -> None:
        """Nothing outlasts a generation."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Nothing outlasts a generation."""
        return {}, {}

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Nothing outlasts a generation."""

    def _next_values(self, slot: RolloutMemory, like: Tensor) -> Tensor:
        """Return the values [P, T, E] of what the steps led to, where that is not what the next step saw."""
        values = torch.zeros_like(like)
        for step in slot.ends():
            following = {name: part.to(self._device) for name, part in slot.next_observation(step).items()}
            values[:, step] = self._policy.value(following, self._on_device(slot.state(step + 1)))
        return values

    def _update_observation_stats(self, observation: Tensors, valid: Tensor) -> None:
        """Let the agents normalise by what was seen in what they have learned from."""
        for part in self._settings.normalized:
            seen = as_numbers(observation[part], self._parts[part]).transpose(0, 1)
            samples = seen.reshape(*seen.shape[:3], -1)
            self._policy.update_observation_stats(part, self._statistics.moments(samples, valid.transpose(0, 1)))

    def _on_device(self, state: Tensor | None) -> Tensor | None:
        return None if state is None else state.to(self._device)


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """Return [P, T, S, ...] of several rollouts' [P, T, E, ...]."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def _flat(values: Tensors) -> Tensors:
    """Return values [P, T, S, ...] as [P, B, ...], time-major."""
    return {name: value.flatten(1, 2) for name, value in values.items()}
