"""Experience for on-policy algorithms: rollout storage and minibatches.

Axes: T steps of a rollout, L steps of a sequence, P agents, E environments, B sequences of a minibatch, N sequences of
a rollout, U updates; recurrent states have K numbers for each unit.
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

WHERE = "the rollout"
STATES, FIRST = "states", "first"
"""A tensor and a number in a snapshot, beside those of the storage."""


class Trajectories:
    """T steps of all environments, with the recurrent states before each of their T / L sequences.

    Memory is allocated at the first step, which shows the shapes of observations and actions.
    """

    def __init__(
        self, steps: int, sequence: int, frames: Mapping[str, int], computed: Sequence[str], device: torch.device
    ) -> None:
        """`frames` gives the stack depth of the stacked parts.

        The columns `computed` are not part of a step; they are written through views.
        """
        self._steps = steps
        self._sequence = sequence
        self._frames = frames
        self._computed = computed
        self._device = device
        self._storage: Storage | None = None
        self._rows: Tensors = {}
        self._first = 0
        self._shape = (0, 0)
        self._states: Tensor | None = None
        self._resumed: tuple[Tensors, dict[str, int]] | None = None

    def write(self, step: int, transition: Transition, columns: Mapping[str, Tensor], state: Tensor | None) -> None:
        """Store a step of all environments and its columns [P, E, ...]; step 0 clears the previous rollout."""
        if self._storage is None:
            self._storage = self._allocate(transition, columns)
        if step == 0:
            self._storage.clear()
        if self._resumed is not None:
            self._go_on(step, *self._resumed)
            self._resumed = None
        self._storage.write(
            {name: value.flatten(0, 1) for name, value in transition.observation.items()},
            {name: value.flatten(0, 1) for name, value in columns.items()},
            next_observation={},
            valid=transition.valid.flatten(),
            started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
        )
        if step == 0:
            # Older frames of the first stacks are in the rows before.
            self._first = self._storage.newest_row
            self._rows = self._storage.window(self._first, self._steps)
        if state is not None and step % self._sequence == 0:
            # Mutations change the number of recurrent units.
            if self._states is None or self._states.shape[1:] != state.shape:
                self._states = state.new_zeros((self._steps // self._sequence, *state.shape))
            self._states[step // self._sequence] = state

    def snapshot(self) -> tuple[Tensors, dict[str, int]]:
        """Return the steps of the rollout so far, at least one."""
        assert self._storage is not None
        tensors, numbers = self._storage.state()
        states = {} if self._states is None else {STATES: self._states}
        return {**tensors, **states}, {**numbers, FIRST: self._first}

    def resume(self, tensors: Tensors, numbers: dict[str, int]) -> None:
        """Go on with the rollout of a `snapshot`.

        Only the next step shows what a step consists of: `write` raises UserError if the snapshot is an invalid one.
        """
        self._resumed = tensors, numbers

    def _go_on(self, step: int, tensors: Tensors, numbers: dict[str, int]) -> None:
        """Load a snapshot of `step` steps. Raises UserError for an invalid one."""
        storage, rows, known = self._storage, dict(tensors), dict(numbers)
        assert storage is not None
        states, first = rows.pop(STATES, None), known.pop(FIRST, -1)
        storage.restore(rows, known)
        # The rows before the first step hold the older frames of its stacks.
        if storage.broken or not 0 <= first < storage.depth or storage.written != first + step:
            raise UserError(f"{WHERE}: it does not have the {step} steps of the rollout that it is said to have")
        if states is not None:
            shape = (self._steps // self._sequence, *self._shape)
            if states.dim() != 5 or tuple(states.shape[:3]) != shape or states.dtype != torch.float32:
                raise UserError(f"{WHERE}: its recurrent states are of other sequences")
            self._states = states.to(self._device)
        self._first = first
        self._rows = storage.window(first, self._steps)

    def column(self, name: str) -> Tensor:
        """Return a view [T, P, E, ...] of a column, the flag `valid`, or an unstacked `observation.` part."""
        values = self._rows[name]
        return values.view(values.shape[0], *self._shape, *values.shape[2:])

    def slots(self, index: Tensor) -> Tensor:
        """Return the slots [U, P, L, B] of the sequences at `index` [U, P, B] of each agent."""
        agents, envs = self._shape
        agent = torch.arange(agents, device=index.device)[:, None, None]
        chunk, env = index // envs, index % envs
        step = chunk.unsqueeze(2) * self._sequence + torch.arange(self._sequence, device=index.device)[:, None]
        return ((self._first + step) * agents + agent) * envs + env.unsqueeze(2)

    def gather(self, slots: Tensor, names: Iterable[str]) -> Found:
        """Gather the transitions at `slots` [...], with the columns and flags in `names`."""
        assert self._storage is not None
        return self._storage.gather(slots, names)

    def states(self, index: Tensor) -> Tensor | None:
        """Return the recurrent states [U, P, B, ...] before the sequences at `index` [U, P, B], or None."""
        if self._states is None:
            return None
        agents, envs = self._shape
        agent = torch.arange(agents, device=index.device)[:, None]
        place = (index // envs * agents + agent) * envs + index % envs
        found = self._states.flatten(0, 2).index_select(0, place.flatten())
        return found.view(*index.shape, *found.shape[1:])

    def _allocate(self, transition: Transition, columns: Mapping[str, Tensor]) -> Storage:
        self._shape = transition.valid.shape[0], transition.valid.shape[1]
        parts = {
            name: ObservationSpec("vector", tuple(value.shape[2:]), value.dtype, frames=self._frames.get(name, 0))
            for name, value in transition.observation.items()
        }
        fields: dict[str, Field] = {name: (tuple(value.shape[2:]), value.dtype) for name, value in columns.items()}
        fields |= dict.fromkeys(self._computed, ((), torch.float32))
        streams = self._shape[0] * self._shape[1]
        return Storage(self._steps, streams, parts, fields, self._device, store_next=False)


@dataclass(frozen=True)
class RolloutLayout:
    """Shapes of a rollout: observation `parts`, per-step columns (`fields`), and the recurrent `state` [K, U]."""

    steps: int
    agents: int
    num_envs: int
    parts: ObservationSpecs
    fields: Mapping[str, Field]
    state: tuple[int, int]

    @property
    def streams(self) -> int:
        return self.agents * self.num_envs


class RolloutMemory:
    """T steps of an actor's environments, overwritten by the next rollout.

    `empty` supplies the memory; an actor writes and a learner reads through two objects of one layout on the same
    memory.
    """

    def __init__(self, layout: RolloutLayout, empty: Empty) -> None:
        self.layout = layout
        steps, streams = layout.steps, layout.streams
        # Every step may leave true last observations; pages never written take no memory.
        self.storage = Storage(
            steps, streams, layout.parts, layout.fields, torch.device("cpu"), empty=empty, last=(steps + 1) * streams
        )
        self._states = empty((steps + 1, layout.agents, layout.num_envs, *layout.state), torch.float32)
        self.counts = empty((len(Collected._fields), layout.agents), torch.float64)
        self.number = 0
        self._first = empty((1,), torch.int64)
        rows = torch.arange(steps).view(1, steps, 1) * streams
        self._places = rows + torch.arange(streams).view(layout.agents, 1, layout.num_envs)

    def write(self, step: int, transition: Transition, output: PolicyOutput) -> None:
        """Store a step of all environments, in order from step 0, which clears the previous rollout."""
        if step == 0:
            self.storage.clear()
        columns = {
            **output.extras,
            "action": output.action,
            "reward": transition.reward,
            "terminated": transition.terminated,
            "truncated": transition.truncated,
            "started": transition.started,
        }
        self.storage.write(
            {name: value.flatten(0, 1) for name, value in transition.observation.items()},
            {name: columns[name].flatten(0, 1) for name in self.layout.fields if name in columns},
            next_observation={name: value.flatten(0, 1) for name, value in transition.next_observation.items()},
            valid=transition.valid.flatten(),
            started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
        )
        if step == 0:
            # Older frames of the first stacks are in the rows before.
            self._first[0] = self.storage.newest_row
        if output.state.numel():
            if step == 0:
                self._states[0] = output.state
            if transition.any_truncated or step == self.layout.steps - 1:
                self._states[step + 1] = output.next_state

    def put(self, name: str, values: Tensor) -> None:
        """Write a column [P, T, E] of all steps that was not part of the steps themselves."""
        first = int(self._first[0])
        rows = self.storage.columns[name][first : first + self.layout.steps]
        rows.copy_(values.transpose(0, 1).flatten(1, 2))

    def state(self, steps: int) -> Tensor | None:
        """Return the recurrent state [P, E, K, U] after `steps` steps: 0, or the end of a step in `ends`."""
        return self._states[steps].clone() if self._states.numel() else None

    def ends(self) -> list[int]:
        """Return the steps whose next observation needs its own bootstrap value: truncated ones and the last."""
        truncated = self.columns(["truncated"])["truncated"]
        truncated[:, -1] = True
        steps: list[int] = truncated.any(0).any(-1).nonzero()[:, 0].tolist()
        return steps

    def observation(self) -> Tensors:
        """Return copies of all observation parts [P, T, E, ...]."""
        return self.storage.observation(self.slots)

    def next_observation(self, step: int) -> Tensors:
        """Return copies of the next-observation parts [P, E, ...] of a step, including true last observations."""
        return self.storage.next_observation(self.slots[:, step])

    def columns(self, names: Iterable[str]) -> Tensors:
        """Return copies of columns and of the flag `valid`, each [P, T, E, ...]."""
        return self.storage.gather_columns(self.slots, names)

    @property
    def slots(self) -> Tensor:
        """The slots [P, T, E] of the steps."""
        return self._places + int(self._first[0]) * self.layout.streams


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
    ) -> None:
        """`targets` computes the learning targets from a rollout and the agents' hyperparameters."""
        super().__init__(settings.steps, gather=gather, device=device, stopwatch=stopwatch)
        self._targets = targets
        self._settings = settings
        self._parts = parts
        self._seed = seed
        self._rank = rank
        self._statistics = RolloutStatistics(gather, stopwatch)
        self._row_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values()) + 32
        frames = {name: part.frames for name, part in parts.items() if part.frames}
        self._trajectories = Trajectories(
            settings.steps, settings.sequence, frames, ("next_value", *settings.targets), device
        )
        self._learned: tuple[str, ...] = ()
        self._step = 0
        # Mask [P] of agents still learning from this rollout; None until one stops early.
        self._left: Tensor | None = None
        self._minibatches: Minibatches
        self._generator: torch.Generator
        self._hparams: Tensors

    def begin(self, policy: Population, generation: int) -> None:
        super().begin(policy, generation)
        agents, settings = policy.agents, self._settings
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
