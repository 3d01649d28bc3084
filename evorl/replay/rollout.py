"""Experience for on-policy algorithms: rollouts and their minibatches.

Axes: T steps of a rollout, L steps of a sequence, P agents, E environments, B sequences of a minibatch, U updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.envs.spaces import ObservationSpecs, as_numbers
from evorl.replay.minibatches import Minibatches
from evorl.replay.moments import Gather
from evorl.replay.protocols import Population
from evorl.replay.rollout_statistics import RolloutStatistics
from evorl.replay.scaling import normalized
from evorl.replay.trajectories import WHERE, Trajectories
from evorl.seeding import torch_generator
from evorl.system.console import Stopwatch
from evorl.system.formats import set_generator
from evorl.types import (
    Agent,
    Batch,
    PolicyOutput,
    RecurrentInput,
    Segment,
    Tensors,
    Transition,
    UpdateResult,
    UserError,
)

Targets = Callable[[Segment, Mapping[str, Tensor]], Tensors]
"""Computes learning targets [T, P, E], such as advantages and returns, from a rollout and hyperparameters [P]."""

STORED, REWARDS, GENERATOR, STEP = "rollout.", "rewards.", "generator", "step"
"""Tensor names, or prefixes of names, and a number in a snapshot."""
GATHERED_BYTES = 2**24
"""Minibatches are gathered in groups of about this many bytes: for small ones, calls cost more than copies."""


@dataclass(frozen=True)
class RolloutSettings:
    """Rollout and sequence lengths, and what is normalised."""

    steps: int
    num_envs: int
    sequence: int
    reward_clip: float | None
    normalize_advantage: bool
    normalize_rewards: bool
    normalized: tuple[str, ...]
    """Observation parts that are normalised."""
    copies: int = 1
    """Number of ranks that share each minibatch; with 1 every rank makes its own."""
    targets: tuple[str, ...] = ("advantage", "return")
    """Names of the targets; one must be `advantage`."""


class RolloutExperience:
    """Collects rollouts of T steps from all environments and yields minibatches of them.

    `period` is the rollout length; a generation has a whole number of rollouts.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        parts: ObservationSpecs,
        targets: Targets,
        *,
        gather: Gather,
        seed: int,
        rank: int,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        """`gather` stacks an array from every rank that holds the same agents along a new leading axis.

        `targets` computes the learning targets from a rollout and the agents' hyperparameters.
        """
        self._targets = targets
        self.period = settings.steps
        self._settings = settings
        self._parts = parts
        self._gather = gather
        self._seed = seed
        self._rank = rank
        self._device = device
        self._stopwatch = stopwatch
        self._statistics = RolloutStatistics(gather, stopwatch)
        self._row_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values()) + 32
        frames = {name: part.frames for name, part in parts.items() if part.frames}
        self._trajectories = Trajectories(
            settings.steps, settings.sequence, frames, ("next_value", *settings.targets), device
        )
        self._learned: tuple[str, ...] = ()
        self._step = 0
        self._policy: Population
        # Mask [P] of agents still learning from this rollout; None until one stops early.
        self._left: Tensor | None = None
        self._minibatches: Minibatches
        self._generator: torch.Generator
        self._hparams: Tensors

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation with the agents of `policy`."""
        agents, settings = policy.agents, self._settings
        self._policy = policy
        self._step, self._left = 0, None
        steps = settings.steps * settings.num_envs
        self._minibatches = Minibatches(agents, steps, settings.sequence, self._device, settings.copies)
        self._generator = torch_generator(
            self._seed, generation=generation, rank=self._rank, purpose="minibatches", device=self._device
        )
        self._hparams = {
            name: torch.tensor([agent.hyperparameters[name] for agent in agents], device=self._device)
            for name in ("gamma", "gae_lambda")
        }
        self._statistics.begin(agents)

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments."""
        step, clip = self._step, self._settings.reward_clip
        state, after = (each if each.numel() else None for each in (output.state, output.next_state))
        columns = {
            **output.extras,
            "reward": transition.reward if clip is None else transition.reward.clamp(-clip, clip),
            "terminated": transition.terminated,
            "truncated": transition.truncated,
        }
        if state is not None:
            columns["started"] = transition.started
        self._trajectories.write(step, transition, columns, state)
        if transition.any_truncated or step == self.period - 1:
            value = self._policy.value(transition.next_observation, after)
            self._trajectories.column("next_value")[step] = value
        if not self._learned:
            recurrent = () if state is None else ("started",)
            self._learned = (*output.extras, *self._settings.targets, "valid", *recurrent)
        self._step += 1

    def batches(self) -> Iterator[Batch]:
        """Yield the minibatches of a complete rollout; every rank of the same agents yields equally many."""
        if self._step < self.period:
            return
        self._step = 0
        self._policy.acted(self._agree_on_steps())
        with self._stopwatch("sampling"):
            self._compute_targets()
            index = self._minibatches.draw(self._generator)
        for batch, later in zip(self._minibatch_batches(index), self._minibatches.later, strict=True):
            yield batch if self._left is None else replace(batch, due=batch.due * self._left, all_due=False)
            # The early-stopping criterion is averaged over ranks, so either all of them stop here or none.
            if self._left is not None and not bool((self._left * later).any()):
                break
        self._left = None
        self._update_observation_stats()

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Drop agents that stopped early from this rollout's remaining minibatches."""
        if result.active is not None:
            before = torch.ones_like(batch.due) if self._left is None else self._left
            self._left = torch.where(batch.due > 0, result.active, before)

    def end(self, agents: list[Agent]) -> None:
        """End the generation; each agent keeps its reward statistics."""
        if self._settings.normalize_rewards:
            self._statistics.end(agents)

    def snapshot(self) -> tuple[Tensors, dict[str, int]]:
        """Return the rollout so far, the reward statistics and the generator of the minibatches."""
        tensors, numbers = self._trajectories.snapshot() if self._step else ({}, {})
        tensors = {f"{STORED}{name}": value for name, value in tensors.items()}
        tensors |= {f"{REWARDS}{name}": value for name, value in self._statistics.snapshot().items()}
        return {**tensors, GENERATOR: self._generator.get_state()}, {**numbers, STEP: self._step}

    def resume(self, tensors: Tensors, numbers: Mapping[str, int]) -> None:
        """Load the output of `snapshot` for the same agents. Raises UserError for an invalid one, or the next `add`."""
        found, known = dict(tensors), dict(numbers)
        step, generator = known.pop(STEP, -1), found.pop(GENERATOR, torch.zeros(0))
        if not 0 <= step < self.period or bool(step) != bool(known):
            raise UserError(f"{WHERE}: {step} steps of {self.period} are no part of one")
        set_generator(self._generator, generator, WHERE)
        rewards = {name.removeprefix(REWARDS): found.pop(name) for name in tensors if name.startswith(REWARDS)}
        self._statistics.resume(rewards, self._settings.num_envs, self._device)
        if step:
            self._trajectories.resume({name.removeprefix(STORED): value for name, value in found.items()}, known)
        self._step = step

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Return nothing: no state outlasts a generation."""
        return {}, {}

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Do nothing: no state outlasts a generation."""

    def _agree_on_steps(self) -> NDArray[np.float64]:
        """Return each agent's valid transitions [P] in the rollout, summed over its ranks."""
        steps = self._trajectories.column("valid").sum((0, 2)).cpu().numpy().astype(np.float64)
        with self._stopwatch("communication"):
            return np.asarray(self._gather(steps).sum(0))

    def _compute_targets(self) -> None:
        """Compute the learning targets of the rollout."""
        names = ("reward", "value", "next_value", "terminated", "truncated", "valid")
        column = {name: self._trajectories.column(name) for name in names}
        if self._settings.normalize_rewards:
            ended = column["terminated"] | column["truncated"] | ~column["valid"]
            column["reward"] = self._statistics.scaled(column["reward"], ended, column["valid"], self._hparams["gamma"])
        for name, values in self._targets(Segment(**column), self._hparams).items():
            self._trajectories.column(name).copy_(values)

    def _update_observation_stats(self) -> None:
        """Update the observation statistics, only once learning from the rollout is over.

        Earlier, new log-probabilities would be compared with old ones under a different normalisation.
        """
        valid = self._trajectories.column("valid")
        for part in self._settings.normalized:
            seen = as_numbers(self._trajectories.column(f"observation.{part}"), self._parts[part])
            self._policy.update_observation_stats(
                part, self._statistics.moments(seen.reshape(*seen.shape[:3], -1), valid)
            )

    def _minibatch_batches(self, index: Tensor) -> Iterator[Batch]:
        """Yield the batches of all updates from sequence indices [U, P, B], gathered in groups."""
        rows = index.shape[1] * index.shape[2] * self._settings.sequence
        at_once = max(1, GATHERED_BYTES // (rows * self._row_bytes))
        for first in range(0, len(index), at_once):
            with self._stopwatch("sampling"):
                batches = self._gathered(index, slice(first, first + at_once))
            yield from batches

    def _gathered(self, index: Tensor, updates: slice) -> list[Batch]:
        """Gather the batches of some updates, from all updates' sequence indices [U, P, B]."""
        index, counted = index[updates], self._minibatches.counted[updates]
        slots = self._trajectories.slots(index)
        seen, _, columns = self._trajectories.gather(slots.flatten(2), self._learned)
        weight = columns.pop("valid") * counted.unsqueeze(2).expand_as(slots).flatten(2)
        if self._settings.copies > 1:
            weight, mean, scale = self._statistics.united(weight, columns["advantage"], self._settings.copies)
            if self._settings.normalize_advantage:
                columns["advantage"] = (columns["advantage"] - mean) * scale
        else:
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
            if self._settings.normalize_advantage:
                columns["advantage"] = normalized(columns["advantage"], weight)
        inputs: list[RecurrentInput | None] = [None] * len(index)
        state = self._trajectories.states(index)
        if state is not None:
            started = columns.pop("started").view(slots.shape)
            inputs = [RecurrentInput(*pair) for pair in zip(state, started, strict=True)]
        due, all_due = self._minibatches.due[updates], self._minibatches.all_due[updates]
        return [
            Batch(
                {name: value[u] for name, value in seen.items()},
                {},
                {name: value[u] for name, value in columns.items()},
                weight[u],
                due[u],
                inputs[u],
                all_due[u],
            )
            for u in range(len(index))
        ]
