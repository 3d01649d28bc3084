"""Experience for on-policy algorithms: rollout storage and minibatches.

Axes: T steps of a rollout, L steps of a sequence, P agents, E environments, B sequences of a minibatch, N sequences of
a rollout, U updates; recurrent states have K numbers for each of their units, [K, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from evorl.envs.spaces import ObservationSpec, ObservationSpecs
from evorl.replay.experience import ActingAgents, Experience
from evorl.replay.observations import ObservationStatistics
from evorl.replay.rollout_buffer import WHERE, RolloutBuffer, RolloutLayout
from evorl.replay.statistics import Gather, RolloutStatistics, normalized
from evorl.replay.storage import Field
from evorl.seeding import torch_generator
from evorl.system.formats import load_like, numbers_to_tensors, part_of, set_generator, with_prefix
from evorl.system.stopwatch import Stopwatch
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


def parts_of(steps: int, batch_size: ArrayLike, sequences: int) -> NDArray[np.int64]:
    """Number of minibatches [P] of `batch_size` [P] steps that a rollout of `steps` steps is split into.

    The count is rounded and lies between 1 and `sequences`.
    """
    return np.clip(np.round(steps / np.asarray(batch_size)), 1, sequences).astype(np.int64)


class Minibatches:
    """Shuffled minibatches: each agent makes `epochs` passes over its rollout, each in a new order.

    Minibatches have about `batch_size` steps, and are as equal as possible where evolution has perturbed the batch size
    to a value that does not divide the rollout. Agents with fewer updates than others skip the last ones.
    """

    def __init__(
        self, epochs: NDArray[np.int64], parts: NDArray[np.int64], sequences: int, device: torch.device
    ) -> None:
        """Each agent cuts `sequences` sequences into `parts` [P] minibatches in each of its `epochs` [P]."""
        agents, self._sequences = len(parts), sequences
        updates = np.arange(int((epochs * parts).max()))[:, None]
        number = updates % parts
        first, last = (number * self._sequences // parts, (number + 1) * self._sequences // parts)
        width = int((last - first).max())
        self.updates = len(updates)
        self._epochs = int(epochs.max())
        within = first[..., None] + np.arange(width)
        in_batch = within < last[..., None]
        epoch = np.minimum(updates // parts, self._epochs - 1)
        rows = epoch * agents + np.arange(agents)
        position = rows[..., None] * self._sequences + np.minimum(within, self._sequences - 1)
        self._position = torch.from_numpy(position).to(device)
        self.in_batch: Tensor = torch.from_numpy(in_batch).to(device)
        """Mask [U, P, B] of the drawn sequences that count; the rest is padding."""
        self.all_due: list[bool] = np.all(updates < epochs * parts, axis=1).tolist()
        """For each update, whether it applies to all agents."""
        self.due: Tensor = torch.from_numpy((updates < epochs * parts).astype(np.float32)).to(device)
        """1 for the agents that an update applies to, else 0 [U, P]."""
        self.later: Tensor = torch.from_numpy((updates + 1 < epochs * parts).astype(np.float32)).to(device)
        """1 for the agents with another update after this one, else 0 [U, P]."""

    @classmethod
    def of(
        cls, agents: Sequence[Agent], steps: int, sequence: int, device: torch.device, copies: int = 1
    ) -> Minibatches:
        """The minibatches that the agents' hyperparameters `batch_size` and `epochs` ask for.

        `steps` is the length of one agent's rollout on this rank, over all environments, in sequences of `sequence`.
        Minibatches of `batch_size` steps are split evenly over `copies` ranks.
        """
        size = np.array([agent.hyperparameters.get("batch_size", steps * copies) for agent in agents]) / copies
        epochs = np.array([max(1, round(agent.hyperparameters.get("epochs", 1))) for agent in agents])
        return cls(epochs, parts_of(steps, size, steps // sequence), steps // sequence, device)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Shuffled sequence indices [U, P, B] for all updates."""
        agents = self.due.shape[1]
        order = torch.rand(
            (self._epochs, agents, self._sequences), generator=generator, device=generator.device
        ).argsort(-1)
        return order.flatten()[self._position]


def check_rollout(steps: int, num_envs: int, sequence: int, batch_size: float | None, copies: int = 1) -> str | None:
    """Error message naming the key that does not divide, or None; `copies` ranks share steps and batches."""
    if steps % copies:
        return (
            f"algorithm.rollout_steps: {steps} steps cannot be shared by {copies} ranks, as algorithm.split_batches "
            f"asks; use a multiple of {copies * sequence}"
        )
    share, among = steps // copies, "" if copies == 1 else f", {steps // copies} on each of {copies} ranks"
    if share % sequence:
        return (
            f"algorithm.sequence_length: {sequence} does not divide algorithm.rollout_steps {steps}{among}; "
            f"use one of {_nearest(_divisors(share), sequence)}"
        )
    whole = share * num_envs
    if batch_size is not None and (
        batch_size % copies or whole % (batch_size / copies) or batch_size / copies % sequence
    ):
        parts = [size for size in _divisors(whole) if size % sequence == 0]
        fitting = _nearest([size * copies for size in parts], batch_size)
        return (
            f"algorithm.batch_size: a rollout of {steps} steps{among} in {num_envs} environments, in sequences of "
            f"{sequence}, does not divide into minibatches of {batch_size:.0f}; use one of {fitting}"
        )
    return None


def _nearest(sizes: list[int], wanted: float) -> list[int]:
    """Up to 12 sizes nearest to the wanted one, sorted."""
    return sorted(sorted(sizes, key=lambda size: abs(size - wanted))[:12])


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


Targets = Callable[[Segment, Mapping[str, Tensor]], Tensors]
"""Computes learning targets [T, P, E], those of `TARGETS` by name, from a rollout and hyperparameters [P]."""
TARGETS = "advantage", "return"

STORED, REWARDS, GENERATOR = "rollout.", "rewards.", "generator"
"""Tensor names, or prefixes of names, in a state."""
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
    stops_early: bool = False
    """Agents may leave a rollout before its last minibatch (PPO's `target_kl`)."""
    copies: int = 1
    """Number of ranks that share each minibatch; with 1 every rank makes its own."""


class RolloutExperience(Experience):
    """Collects rollouts of T steps from all environments and yields minibatches of them."""

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
        discount: Callable[[Tensor], Tensor] = lambda gamma: gamma,
    ) -> None:
        """`targets` computes the learning targets from a rollout and the agents' hyperparameters.

        `discount` is the factor [P] of a step in sums of rewards, from discounts gamma [P].
        """
        super().__init__(settings.steps, gather=gather, device=device, stopwatch=stopwatch)
        self._targets, self._discount = targets, discount
        self._settings = settings
        self._parts = parts
        self._seed = seed
        self._rank = rank
        self._statistics = RolloutStatistics(gather, stopwatch)
        self._normalized = {name: parts[name] for name in settings.normalized}
        self._observations = ObservationStatistics(self._normalized, gather, stopwatch)
        self._row_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values()) + 32
        self._rollout: RolloutBuffer
        self._layout: RolloutLayout | None = None
        self._resumed: Tensors | None = None
        self._learned: tuple[str, ...] = ()
        self._step = 0
        # Mask [P] of agents still learning from this rollout; None until one stops early.
        self._left: Tensor | None = None
        self._minibatches: Minibatches
        self._generator: torch.Generator
        self._hparams: Tensors

    def begin(self, policy: ActingAgents, generation: int) -> None:
        super().begin(policy, generation)
        agents, settings = policy.agents, self._settings
        self._step, self._left, self._resumed = 0, None, None
        steps = settings.steps * settings.num_envs
        self._minibatches = Minibatches.of(agents, steps, settings.sequence, self._device, settings.copies)
        self._generator = torch_generator(
            self._seed, generation=generation, rank=self._rank, purpose="minibatches", device=self._device
        )
        self._hparams = {
            name: torch.tensor([agent.hyperparameters[name] for agent in agents], device=self._device)
            for name in ("gamma", "gae_lambda")
        }
        self._statistics.begin(agents)

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments. Raises UserError if a resumed state does not fit it."""
        step, clip = self._step, self._settings.reward_clip
        if clip is not None:
            transition = replace(transition, reward=transition.reward.clamp(-clip, clip))
        if step == 0 or self._resumed is not None:
            self._allocate(transition, output)
        self._rollout.write(step, transition, output)
        if transition.any_truncated or step == self.period - 1:
            state = output.next_state if output.next_state.numel() else None
            value = self._policy.value(transition.next_observation, state)
            self._rollout.column("next_value")[step] = value
        self._step += 1

    def _allocate(self, transition: Transition, output: PolicyOutput) -> None:
        """Allocate memory for rollouts of steps like this one, unless the previous rollout's memory fits.

        Mutations change the size of recurrent states.
        """
        settings, recurrent = self._settings, output.state.numel() > 0
        columns = {
            **output.extras,
            "reward": transition.reward,
            "terminated": transition.terminated,
            "truncated": transition.truncated,
        }
        if recurrent:
            columns["started"] = transition.started
        fields: dict[str, Field] = {name: (tuple(value.shape[2:]), value.dtype) for name, value in columns.items()}
        fields |= dict.fromkeys(("next_value", *TARGETS), ((), torch.float32))
        stacked = {name: part.frames for name, part in self._parts.items()}
        parts = {
            name: ObservationSpec("vector", tuple(value.shape[2:]), value.dtype, frames=stacked.get(name, 0))
            for name, value in transition.observation.items()
        }
        agents, envs = transition.valid.shape
        state = (output.state.shape[2], output.state.shape[3]) if recurrent else (0, 0)
        layout = RolloutLayout(settings.steps, agents, envs, parts, fields, state, settings.sequence)
        if layout != self._layout:
            self._rollout, self._layout = RolloutBuffer(layout, self._device), layout
            self._learned = (*output.extras, *TARGETS, "valid", *(["started"] if recurrent else []))
        if self._resumed is not None:
            self._rollout.load_state_dict(self._resumed)
            self._resumed = None
            if self._rollout.steps_held != self._step:
                raise UserError(f"{WHERE}: it does not hold the {self._step} steps that the interim checkpoint records")

    def take_batches(self) -> Iterator[Batch]:
        """Yield the minibatches of a complete rollout; every rank of the same agents yields equally many."""
        if self._step < self.period:
            return
        self._step = 0
        steps = self._count_steps()
        with self._stopwatch("sampling"):
            self._compute_targets()
            index = self._minibatches.draw(self._generator)
        for batch, later in zip(self._minibatch_batches(index), self._minibatches.later, strict=True):
            yield batch if self._left is None else replace(batch, due=batch.due * self._left, all_due=False)
            # The early-stopping criterion is averaged over ranks, so either all of them stop here or none.
            if self._left is not None and not bool((self._left * later).any()):
                break
        self._left = None
        self._policy.acted(steps)
        self._update_observation_stats()

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Drop agents that stopped early from this rollout's remaining minibatches."""
        # Otherwise `batches` would wait for the GPU before each minibatch, where `active` is always given.
        if result.active is not None and self._settings.stops_early:
            before = torch.ones_like(batch.due) if self._left is None else self._left
            self._left = torch.where(batch.due > 0, result.active, before)

    def end(self, agents: list[Agent]) -> None:
        """End the generation; each agent keeps its reward statistics."""
        super().end(agents)
        if self._settings.normalize_rewards:
            self._statistics.end(agents)

    def state_dict(self) -> Tensors:
        """Within a generation: the rollout so far, the reward statistics and the generator of the minibatches."""
        if not self._has_begun:
            return {}
        stored = (self._resumed or self._rollout.state_dict()) if self._step else {}
        state = with_prefix(STORED, stored) | with_prefix(REWARDS, self._statistics.state_dict())
        return state | {GENERATOR: self._generator.get_state()} | numbers_to_tensors(step=self._step)

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict` for the same agents. Raises UserError for another one, here or in `add`."""
        if not self._has_begun:
            return
        tensors = {GENERATOR: self._generator.get_state()} | numbers_to_tensors(step=0)
        load_like({name: state[name] for name in tensors if name in state}, tensors, WHERE)
        step, stored = int(tensors["step"]), part_of(STORED, state)
        if not 0 <= step < self.period or bool(step) != bool(stored):
            raise UserError(f"{WHERE}: its {step} stored steps do not fit a rollout of {self.period} steps")
        set_generator(self._generator, tensors[GENERATOR], WHERE)
        self._statistics.load_state_dict(part_of(REWARDS, state), self._settings.num_envs, self._device)
        # The shapes of a step are not known before the next `add`.
        self._step, self._resumed = step, stored or None

    def _count_steps(self) -> NDArray[np.float64]:
        """Each agent's valid transitions [P] in the rollout, summed over its ranks."""
        steps = self._rollout.column("valid").sum((0, 2)).cpu().numpy().astype(np.float64)
        with self._stopwatch("communication"):
            return np.asarray(self._gather(steps).sum(0))

    def _compute_targets(self) -> None:
        """Compute the learning targets of the rollout."""
        names = ("reward", "value", "next_value", "terminated", "truncated", "valid")
        column = {name: self._rollout.column(name) for name in names}
        if self._settings.normalize_rewards:
            ended = column["terminated"] | column["truncated"] | ~column["valid"]
            discount = self._discount(self._hparams["gamma"])
            column["reward"] = self._statistics.scaled(column["reward"], ended, column["valid"], discount)
        for name, values in self._targets(Segment(**column), self._hparams).items():
            self._rollout.column(name).copy_(values)

    def _update_observation_stats(self) -> None:
        """Update the observation statistics, only once learning from the rollout is over.

        Earlier, new log-probabilities would be compared with old ones under a different normalisation.
        """
        rollout = {name: self._rollout.column(f"observation.{name}").transpose(0, 1) for name in self._normalized}
        self._observations.merge(self._policy, rollout, self._rollout.column("valid").transpose(0, 1))

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
        index, in_batch = index[updates], self._minibatches.in_batch[updates]
        steps = self._rollout.sequence_index(index)
        seen, _, columns = self._rollout.gather(steps.flatten(2), self._learned)
        weight = columns.pop("valid") * in_batch.unsqueeze(2).expand_as(steps).flatten(2)
        if self._settings.copies > 1:
            weight, mean, scale = self._statistics.united(weight, columns["advantage"], self._settings.copies)
            if self._settings.normalize_advantage:
                columns["advantage"] = (columns["advantage"] - mean) * scale
        else:
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
            if self._settings.normalize_advantage:
                columns["advantage"] = normalized(columns["advantage"], weight)
        inputs: list[RecurrentInput | None] = [None] * len(index)
        state = self._rollout.states(index)
        if state is not None:
            started = columns.pop("started").view(steps.shape)
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
