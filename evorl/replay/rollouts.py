"""Experience for on-policy algorithms: rollouts and minibatches of them.

Axes: T steps of a rollout, L steps of a sequence, P agents, E environments, B sequences of a minibatch, N sequences of
a rollout, U updates. Minibatches are made of whole sequences, which have one step unless agents are recurrent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.config import AnyConfig
from evorl.config.actor_critic import minibatches_of
from evorl.envs.spaces import ObservationSpecs
from evorl.replay.experience import ActingAgents, Experience
from evorl.replay.observations import ObservationStatistics
from evorl.replay.statistics import WHERE, Gather, RolloutStatistics, normalized
from evorl.seeding import torch_generator
from evorl.system.formats import load_like, numbers_to_tensors, part_of, with_prefix
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent
from evorl.types.batches import Batch, PolicyOutput, RecurrentInput, Segment, Transition
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors


class Minibatches:
    """Shuffled minibatches: each agent makes `epochs` passes over its rollout, each in a new order.

    They are as equal as possible where evolution has perturbed the batch size to a value that does not divide the
    rollout. Agents with fewer updates than others skip the last ones.
    """

    def __init__(
        self, epochs: NDArray[np.int64], parts: NDArray[np.int64], sequences: int, device: torch.device
    ) -> None:
        """Each agent cuts `sequences` sequences into `parts` [P] minibatches in each of its `epochs` [P]."""
        updates = np.arange(int((epochs * parts).max()))[:, None]
        number, agents = updates % parts, np.arange(len(parts))
        first, last = number * sequences // parts, (number + 1) * sequences // parts
        within = first[..., None] + np.arange(int((last - first).max()))
        in_batch = within < last[..., None]
        self._orders = int(epochs.max()), len(parts), sequences
        """The shape of the orders of all passes."""
        rows = np.minimum(updates // parts, int(epochs.max()) - 1) * len(parts) + agents
        position = rows[..., None] * sequences + np.minimum(within, sequences - 1)
        self._position = torch.from_numpy(position).to(device)
        self.in_batch: Tensor = torch.from_numpy(in_batch).to(device)
        """Mask [U, P, B] of the drawn sequences that count; the rest is padding."""
        self.all_due: list[bool] = np.all(updates < epochs * parts, axis=1).tolist()
        """For each update, whether it applies to all agents."""
        self.due: Tensor = torch.from_numpy((updates < epochs * parts).astype(np.float32)).to(device)
        """1 for the agents that an update applies to, else 0 [U, P]."""

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
        return cls(epochs, minibatches_of(steps, size, steps // sequence), steps // sequence, device)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Shuffled sequence indices [U, P, B] for all updates."""
        order = torch.rand(self._orders, generator=generator, device=generator.device).argsort(-1)
        return order.flatten()[self._position]


def cut(rollout: Batch, index: Tensor, in_batch: Tensor) -> Batch:
    """The sequences `index` [U, P, B] of each agent's N: all minibatches stacked in one batch [U, P, L * B].

    A rollout is time-major, [P, L * N]. All its valid steps that are `in_batch` [U, P, B] weigh the same.
    """
    (agents, rows), recurrent = rollout.weight.shape, rollout.recurrent
    sequences = rows if recurrent is None else recurrent.state.shape[1]
    agent = torch.arange(agents, device=index.device).unsqueeze(-1)
    steps = torch.arange(0, rows, sequences, device=index.device).unsqueeze(-1) + index.unsqueeze(2)
    position = (steps.flatten(2) + agent * rows).flatten()

    def drawn(values: Tensor) -> Tensor:
        rows = values.flatten(0, 1).index_select(0, position)
        return rows.view(*index.shape[:2], -1, *values.shape[2:])

    columns = {name: drawn(values) for name, values in rollout.columns.items()}
    weight = (columns["valid"] * in_batch.unsqueeze(2).expand_as(steps).flatten(2)).float()
    if recurrent is not None:
        recurrent = RecurrentInput(recurrent.state[agent, index], drawn(recurrent.started.flatten(1)).view_as(steps))
    return replace(
        rollout,
        observation={name: drawn(values) for name, values in rollout.observation.items()},
        columns=columns,
        weight=weight / weight.sum(-1, keepdim=True).clamp(min=1),
        due=rollout.due.expand(index.shape[:2]),
        recurrent=recurrent,
    )


def check_rollout(steps: int, num_envs: int, sequence: int, batch_size: float | None, copies: int = 1) -> None:
    """Raise UserError, which names the key, where something does not divide; `copies` ranks share steps and batches."""
    whole = steps * num_envs
    if steps % copies:
        raise UserError(
            f"algorithm.rollout_steps: {steps} steps cannot be shared by {copies} ranks, as algorithm.split_batches "
            f"asks; use a multiple of {copies * sequence}"
        )
    if steps // copies % sequence:
        raise UserError(
            f"algorithm.sequence_length: {sequence} does not divide the {steps // copies} steps of a rollout on each "
            f"rank (algorithm.rollout_steps); use a divisor of {steps // copies}"
        )
    if batch_size is not None and (whole % batch_size or batch_size % (sequence * copies)):
        multiple = f" that is a multiple of {sequence * copies}" if sequence * copies > 1 else ""
        raise UserError(
            f"algorithm.batch_size: a rollout of {steps} steps in {num_envs} environments does not divide into "
            f"minibatches of {batch_size:.0f}; use a divisor of {whole}{multiple}"
        )


Targets = Callable[[Segment, Mapping[str, Tensor]], Tensors]
"""Computes the learning targets `advantage` and `return` [T, P, E] from a rollout and hyperparameters [P]."""

STORED, REWARDS, GENERATOR, OBSERVATION = "rollout.", "rewards.", "generator", "observation."
"""Tensor names, or prefixes of names, in a state."""
GATHERED_BYTES = 2**24
"""Minibatches are gathered in groups of about this many bytes: for small ones, calls cost more than copies."""


class RolloutExperience(Experience):
    """Collects rollouts of T steps from all environments and yields minibatches of them."""

    def __init__(
        self,
        config: AnyConfig,
        parts: ObservationSpecs,
        targets: Targets,
        *,
        sequence: int,
        normalized: ObservationSpecs,
        copies: int,
        discount: Callable[[Tensor], Tensor] = lambda gamma: gamma,
        gather: Gather,
        rank: int,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        """`targets` computes the learning targets from a rollout and the agents' hyperparameters.

        Minibatches consist of sequences of `sequence` steps; `copies` ranks share each of them. The `normalized` parts
        of observations are normalised. `discount` is the factor [P] of a step in sums of rewards, from discounts gamma
        [P].
        """
        self._settings, self._num_envs = config.algorithm, config.environment.num_envs
        super().__init__(self._settings.rollout_steps // copies, gather=gather, device=device, stopwatch=stopwatch)
        self._targets, self._discount = targets, discount
        self._sequence, self._copies = sequence, copies
        self._seed, self._rank = config.seed, rank
        self._statistics = RolloutStatistics(gather, stopwatch)
        self._normalized = normalized
        self._observations = ObservationStatistics(normalized, gather, stopwatch)
        self._row_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values()) + 32
        self._rollout: Tensors = {}
        """All that is stored of the steps [T, P, E, ...]."""
        self._resumed: Tensors | None = None
        self._step = 0
        self._all_valid = False
        """All steps of the rollout so far are known to be transitions."""
        self._minibatches: Minibatches
        self._generator: torch.Generator
        self._hparams: Tensors

    def begin(self, policy: ActingAgents, generation: int) -> None:
        super().begin(policy, generation)
        agents, steps = policy.agents, self.period * self._num_envs
        self._step, self._resumed = 0, None
        self._minibatches = Minibatches.of(agents, steps, self._sequence, self._device, self._copies)
        self._generator = torch_generator(
            self._seed, generation=generation, rank=self._rank, purpose="minibatches", device=self._device
        )
        self._hparams = {
            name: torch.tensor([agent.hyperparameters[name] for agent in agents], device=self._device)
            for name in agents[0].hyperparameters
        }
        self._statistics.begin(agents)
        self._observations.begin(policy)

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments. Raises UserError if a resumed state does not fit it."""
        step, clip, recurrent = self._step, self._settings.reward_clip, output.state.numel() > 0
        columns = {
            **with_prefix(OBSERVATION, dict(transition.observation)),
            **output.extras,
            "reward": transition.reward if clip is None else transition.reward.clamp(-clip, clip),
            "terminated": transition.terminated,
            "truncated": transition.truncated,
            "valid": transition.valid,
        }
        if recurrent:
            columns |= {"started": transition.started, "state": output.state}
        if transition.any_truncated or step == self.period - 1:
            state = output.next_state if recurrent else None
            columns["next_value"] = self._policy.value(transition.next_observation, state)
        if step == 0:
            self._statistics.begin_rollout(transition.started)
        if step == 0 or self._resumed is not None:
            self._all_valid = step == 0
            self._allocate({"next_value": columns["reward"]} | columns)
        self._all_valid &= transition.all_valid
        for name, values in columns.items():
            self._rollout[name][step] = values
        self._step += 1

    def _allocate(self, columns: Tensors) -> None:
        """Allocate memory for rollouts of steps like these [P, E, ...], and load what was resumed.

        Mutations change the size of recurrent states, so the memory of the previous rollout may not fit.
        """
        if {name: values[0].shape for name, values in self._rollout.items()} != {
            name: values.shape for name, values in columns.items()
        }:
            self._rollout = {
                name: torch.zeros(self.period, *values.shape, dtype=values.dtype, device=self._device)
                for name, values in columns.items()
            }
        if self._resumed is not None:
            load_like(self._resumed, {name: values[: self._step] for name, values in self._rollout.items()}, WHERE)
            self._resumed = None

    def take_batches(self) -> Iterator[Batch]:
        """Yield the minibatches of a complete rollout; every rank of the same agents yields equally many."""
        if self._step < self.period:
            return
        self._step = 0
        steps = self._count_steps()
        with self._stopwatch("sampling"):
            rollout = self._whole_rollout()
            index = self._minibatches.draw(self._generator)
        yield from self._batches(rollout, index)
        self._policy.acted(steps)
        # Only now: earlier, new log-probabilities would be compared with old ones under a different normalisation.
        seen = {name: self._rollout[OBSERVATION + name].transpose(0, 1) for name in self._normalized}
        self._observations.merge(seen, self._rollout["valid"].transpose(0, 1))

    def end(self, agents: list[Agent]) -> None:
        """End the generation; each agent keeps its reward statistics."""
        super().end(agents)
        if self._settings.normalize_rewards:
            self._statistics.end(agents)

    def state_dict(self) -> Tensors:
        """Running sums of rewards; within a generation, also the rollout so far, other statistics and the generator."""
        sums = self._statistics.sums()
        if not self._has_begun:
            return sums
        stored = self._resumed or {name: values[: self._step] for name, values in self._rollout.items()}
        state = with_prefix(STORED, stored if self._step else {}) | with_prefix(REWARDS, self._statistics.state_dict())
        return state | sums | {GENERATOR: self._generator.get_state()} | numbers_to_tensors(step=self._step)

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict` for the same agents. Raises UserError for another one, here or in `add`."""
        self._statistics.load_sums(state, self._device)
        if not self._has_begun:
            return
        tensors = {GENERATOR: self._generator.get_state()} | numbers_to_tensors(step=0)
        load_like({name: state[name] for name in tensors if name in state}, tensors, WHERE)
        step, stored = int(tensors["step"]), part_of(STORED, state)
        if not 0 <= step < self.period or bool(step) != bool(stored):
            raise UserError(f"{WHERE}: its {step} stored steps do not fit a rollout of {self.period} steps")
        self._generator.set_state(tensors[GENERATOR])
        self._statistics.load_state_dict(part_of(REWARDS, state))
        self._statistics.check_sums((len(self._hparams["gamma"]), self._num_envs))
        # The shapes of a step are not known before the next `add`.
        self._step, self._resumed = step, stored or None

    def _count_steps(self) -> NDArray[np.float64]:
        """Each agent's valid transitions [P] in the rollout, summed over its ranks."""
        if self._all_valid:
            agents, environments = self._rollout["valid"].shape[1:]
            steps = np.full(agents, float(self.period * environments))
        else:
            steps = self._rollout["valid"].sum((0, 2)).cpu().numpy().astype(np.float64)
        with self._stopwatch("communication"):
            return np.asarray(self._gather(steps).sum(0))

    def _whole_rollout(self) -> Batch:
        """The rollout with its learning targets, as one batch [P, L * N] of all sequences, time-major."""
        columns = dict(self._rollout)
        segment = Segment(*(columns[name] for name in Segment._fields))
        if self._settings.normalize_rewards:
            ended, valid = columns["terminated"] | columns["truncated"] | ~columns["valid"], columns["valid"]
            discount = self._discount(self._hparams["gamma"])
            scaled = self._statistics.scaled(columns["reward"], ended, valid, discount)
            segment = segment._replace(reward=scaled)
        columns |= self._targets(segment, self._hparams)
        for name in ("reward", "next_value", "terminated", "truncated"):
            del columns[name]
        state, recurrent = columns.pop("state", None), None
        # [T, P, E, ...] -> [T / L, P, L, E, ...] -> [P, L, N, ...]
        rows = {
            name: values.unflatten(0, (-1, self._sequence)).movedim(2, 0).transpose(1, 2).flatten(2, 3)
            for name, values in columns.items()
        }
        if state is not None:
            first = state[:: self._sequence].transpose(0, 1).flatten(1, 2)
            recurrent = RecurrentInput(first, rows.pop("started"))
        flat = {name: values.flatten(1, 2) for name, values in rows.items()}
        observation = part_of(OBSERVATION, flat)
        columns = {name: values for name, values in flat.items() if not name.startswith(OBSERVATION)}
        return Batch(observation, {}, columns, columns["valid"], self._minibatches.due, recurrent)

    def _batches(self, rollout: Batch, index: Tensor) -> Iterator[Batch]:
        """Yield the batches of all updates from sequence indices [U, P, B], gathered in groups."""
        rows = index.shape[1] * index.shape[2] * self._sequence
        at_once = max(1, GATHERED_BYTES // (rows * self._row_bytes))
        for first in range(0, len(index), at_once):
            with self._stopwatch("sampling"):
                group = slice(first, first + at_once)
                batches = self._gathered(replace(rollout, due=rollout.due[group]), index[group], group)
            yield from batches

    def _gathered(self, rollout: Batch, index: Tensor, updates: slice) -> list[Batch]:
        """The batches of some updates, with their advantages normalised if that is configured."""
        batch = cut(rollout, index, self._minibatches.in_batch[updates])
        columns, normalize = batch.columns, self._settings.normalize_advantage
        del columns["valid"]
        if self._copies > 1:
            batch.weight, mean, scale = self._statistics.united(batch.weight > 0, columns["advantage"], self._copies)
            if normalize:
                columns["advantage"] = (columns["advantage"] - mean) * scale
        elif normalize:
            columns["advantage"] = normalized(columns["advantage"], batch.weight)
        return batch.unbound(self._minibatches.all_due[updates])
