"""Experience for on-policy algorithms: rollout storage and minibatches.

Axes: T steps of a rollout, L steps of a sequence, P agents, E environments, B sequences of a minibatch, N sequences of
a rollout, U updates; recurrent states have K numbers for each of their units, [K, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from evorl.envs.episodes import Collected
from evorl.envs.spaces import ObservationSpec, ObservationSpecs, as_numbers
from evorl.replay.experience import Experience, Population
from evorl.replay.statistics import Gather, RolloutStatistics, normalized
from evorl.replay.storage import Empty, Field, Found, Storage
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
    UserError,
)

WHERE = "the rollout"
STATES, FIRST = "states", "first"
"""Tensors in a state, besides those of the storage."""


@dataclass(frozen=True)
class RolloutLayout:
    """Shapes of a rollout: observation `parts`, per-step columns (`fields`), and the recurrent `state` [K, N].

    Recurrent states are stored before every `sequence`-th step and after the last one.
    """

    steps: int
    agents: int
    num_envs: int
    parts: ObservationSpecs
    fields: Mapping[str, Field]
    state: tuple[int, int]
    sequence: int = 1

    @property
    def streams(self) -> int:
        return self.agents * self.num_envs


class RolloutBuffer:
    """T steps of all environments with their recurrent states, overwritten by the next rollout.

    With memory from `empty`, two buffers of one layout on the same memory show the same rollout: an actor writes to
    one, and a learner reads the other.
    """

    def __init__(
        self, layout: RolloutLayout, device: torch.device, store_next: bool = False, empty: Empty | None = None
    ) -> None:
        """Without `store_next` the buffer has no next observations."""
        self.layout = layout
        steps, streams = layout.steps, layout.streams
        # Every step may leave final observations; pages never written take no memory.
        last = (steps + 1) * streams if store_next else None
        self.storage = Storage(steps, streams, layout.parts, layout.fields, device, store_next, empty=empty, last=last)
        shape = (steps // layout.sequence + 1, layout.agents, layout.num_envs, *layout.state)
        self._states = torch.zeros(shape, device=device) if empty is None else empty(shape, torch.float32)
        # The row of the first step, after any rows with older frames of stacks. On the CPU, because the host reads it.
        self._first = torch.zeros(1, dtype=torch.int64) if empty is None else empty((1,), torch.int64)

    def write(self, step: int, transition: Transition, output: PolicyOutput) -> None:
        """Store a step of all environments, in order from step 0, which clears the previous rollout.

        Of the transition and the policy's extras, the columns in the layout are stored.
        """
        layout, storage = self.layout, self.storage
        if step == 0:
            storage.clear()
        columns = {
            **output.extras,
            "action": output.action,
            "reward": transition.reward,
            "terminated": transition.terminated,
            "truncated": transition.truncated,
            "started": transition.started,
        }
        storage.write_step(transition, {name: columns[name] for name in layout.fields if name in columns})
        if step == 0:
            self._first[0] = storage.newest_row
        if self._states.numel():
            if step % layout.sequence == 0:
                self._states[step // layout.sequence] = output.state
            if step == layout.steps - 1:
                self._states[-1] = output.next_state

    def column(self, name: str) -> Tensor:
        """View [T, P, E, ...] of a column, the flag `valid`, or an unstacked `observation.` part.

        Columns of the layout that are no part of a step are written through it.
        """
        layout = self.layout
        rows = self.storage.window(int(self._first[0]), layout.steps)[name]
        return rows.view(layout.steps, layout.agents, layout.num_envs, *rows.shape[2:])

    @property
    def slots(self) -> Tensor:
        """The slots [P, T, E] of the steps."""
        layout, device = self.layout, self.storage.device
        step, agent, env = (torch.arange(n, device=device) for n in (layout.steps, layout.agents, layout.num_envs))
        return self._slots(step.view(1, -1, 1), agent.view(-1, 1, 1), env)

    def sequence_slots(self, index: Tensor) -> Tensor:
        """Slots [U, P, L, B] of the sequences at `index` [U, P, B] of each agent."""
        layout, device = self.layout, index.device
        step = (index // layout.num_envs).unsqueeze(2) * layout.sequence
        along = torch.arange(layout.sequence, device=device)[:, None]
        agent = torch.arange(layout.agents, device=device)[:, None, None]
        return self._slots(step + along, agent, (index % layout.num_envs).unsqueeze(2))

    def _slots(self, step: Tensor | int, agent: Tensor, env: Tensor) -> Tensor:
        return ((int(self._first[0]) + step) * self.layout.agents + agent) * self.layout.num_envs + env

    def gather(self, slots: Tensor, names: Iterable[str]) -> Found:
        """Copies of the transitions at `slots` [...], with the columns and flags in `names`."""
        return self.storage.gather(slots, names)

    def observation(self) -> Tensors:
        """Copies of all observation parts [P, T, E, ...]."""
        return self.storage.observation(self.slots)

    def next_observation(self, step: int) -> Tensors:
        """Copies of the next-observation parts [P, E, ...] of a step, including final observations."""
        agent, env = (torch.arange(n, device=self.storage.device) for n in (self.layout.agents, self.layout.num_envs))
        return self.storage.next_observation(self._slots(step, agent[:, None], env))

    def columns(self, names: Iterable[str]) -> Tensors:
        """Copies of columns and of the flag `valid`, each [P, T, E, ...]."""
        return self.storage.gather_columns(self.slots, names)

    def ends(self) -> list[int]:
        """Steps whose next observation needs its own bootstrap value: truncated ones and the last."""
        truncated = self.column("truncated").flatten(1).any(1)
        truncated[-1] = True
        steps: list[int] = truncated.nonzero()[:, 0].tolist()
        return steps

    def state(self, steps: int) -> Tensor | None:
        """Copy of the recurrent state [P, E, K, N] after `steps` steps, a multiple of the sequence length, or None."""
        return self._states[steps // self.layout.sequence].clone() if self._states.numel() else None

    def states(self, index: Tensor) -> Tensor | None:
        """Recurrent states [U, P, B, K, N] before the sequences at `index` [U, P, B], or None."""
        if not self._states.numel():
            return None
        agents, envs = self.layout.agents, self.layout.num_envs
        agent = torch.arange(agents, device=index.device)[:, None]
        place = (index // envs * agents + agent) * envs + index % envs
        found = self._states.flatten(0, 2).index_select(0, place.flatten())
        return found.view(*index.shape, *found.shape[1:])

    @property
    def steps_held(self) -> int:
        """The number of steps that are stored."""
        return self.storage.written - int(self._first[0])

    def state_dict(self) -> Tensors:
        """The steps of the rollout so far, at least one."""
        return self.storage.state_dict() | self._tensors()

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict` of a buffer of the same layout. Raises UserError for another one."""
        tensors = self._tensors()
        load_like({name: state[name] for name in (FIRST, STATES) if name in state}, tensors, WHERE)
        try:
            self.storage.load_state_dict({name: values for name, values in state.items() if name not in tensors})
        except UserError as error:
            raise UserError(f"{WHERE} of an interim checkpoint: {error}") from error
        # The rows before the first step hold the older frames of its stacks.
        if self.storage.broken or not 0 <= int(self._first[0]) < self.storage.depth:
            raise UserError(f"{WHERE}: its first step is in row {int(self._first[0])}")

    def _tensors(self) -> Tensors:
        return {FIRST: self._first} | ({STATES: self._states} if self._states.numel() else {})


class RolloutMemory(RolloutBuffer):
    """A rollout in memory that an actor shares with its learner, with the actor's counters."""

    def __init__(self, layout: RolloutLayout, empty: Empty) -> None:
        super().__init__(layout, torch.device("cpu"), store_next=True, empty=empty)
        self.counts = empty((len(Collected._fields), layout.agents), torch.float64)
        self.number = 0


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
        place = updates % parts
        first, last = (place * self._sequences // parts, (place + 1) * self._sequences // parts)
        width = int((last - first).max())
        self.updates = len(updates)
        self._epochs = int(epochs.max())
        within = first[..., None] + np.arange(width)
        counted = within < last[..., None]
        epoch = np.minimum(updates // parts, self._epochs - 1)
        rows = epoch * agents + np.arange(agents)
        position = rows[..., None] * self._sequences + np.minimum(within, self._sequences - 1)
        self._position = torch.from_numpy(position).to(device)
        self.counted: Tensor = torch.from_numpy(counted).to(device)
        """Mask [U, P, B] of the drawn sequences that count; the rest is padding."""
        self.all_due: list[bool] = np.all(updates < epochs * parts, axis=1).tolist()
        """For each update, whether it applies to all agents."""
        self.due: Tensor = torch.from_numpy((updates < epochs * parts).astype(np.float32)).to(device)
        """1 for the agents that an update applies to, else 0 [U, P]."""
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
        self._row_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values()) + 32
        self._rollout: RolloutBuffer
        self._layout: RolloutLayout | None = None
        self._resumed: Tensors | None = None
        self._learned: tuple[str, ...] = ()
        self._step = 0
        self._minibatches: Minibatches
        self._generator: torch.Generator
        self._hparams: Tensors

    def begin(self, policy: Population, generation: int) -> None:
        super().begin(policy, generation)
        agents, settings = policy.agents, self._settings
        self._step, self._resumed = 0, None
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

    def batches(self) -> Iterator[Batch]:
        """Yield the minibatches of a complete rollout; every rank of the same agents yields equally many."""
        if self._step < self.period:
            return
        self._step = 0
        steps = self._agree_on_steps()
        with self._stopwatch("sampling"):
            self._compute_targets()
            index = self._minibatches.draw(self._generator)
        yield from self._minibatch_batches(index)
        self._policy.acted(steps)
        self._update_observation_stats()

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

    def _agree_on_steps(self) -> NDArray[np.float64]:
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
        valid = self._rollout.column("valid")
        for part in self._settings.normalized:
            seen = as_numbers(self._rollout.column(f"observation.{part}"), self._parts[part])
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
        slots = self._rollout.sequence_slots(index)
        seen, _, columns = self._rollout.gather(slots.flatten(2), self._learned)
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
        state = self._rollout.states(index)
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
