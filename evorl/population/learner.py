"""Learning of a policy's stacks, and the learning state that several processes share.

Axes: P agents, B batch, D all parameters and moments, N networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evorl.algorithms import Algorithm, Objective
from evorl.population.graphs import Recorder, UpdateGraphs
from evorl.population.policy import Policy
from evorl.population.stack_learner import COMMON, WHERE, StackLearner, share_within
from evorl.replay.received import gradient_batch
from evorl.system.formats import load_like, numbers_to_tensors, part_of, with_prefix
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent
from evorl.types.batches import Batch, Loss, UpdateMetrics, UpdateResult
from evorl.types.tensors import Tensors

NUMBERS = ("calls", "partial_calls", "checks_agents", "delay_phase")
"""The whole numbers in a state."""


class UpdateKind(NamedTuple):
    """The control flow of an update, which the host decides; updates of one kind launch the same operations.

    It consists of the objectives that are `due` (None where agents differ in the phase of delayed ones) and those that
    are `reported`, of whether each agent's numbers are checked, and of whether all agents are due.
    """

    due: tuple[bool, ...] | None
    reported: tuple[bool, ...]
    checks_agents: bool
    all_due: bool


class Learner:
    """Updates the agents of a policy.

    `average` replaces a flat gradient by its mean over the ranks that hold the same agents, in one call for all stacks.
    """

    policy: Policy
    """The stacks that learn; their parameters change in place."""
    stacks: list[StackLearner]
    gradients: Tensors
    """Each network's flat gradient in all stacks, then every agent's mean loss: one collective averages both, so that
    all ranks decide alike who takes a step."""
    _algorithm: Algorithm
    _checks_agents: bool
    """True once a gradient may have held non-finite values: then those of each agent are checked in every update."""
    _calls: int
    """Calls of `update`."""
    _partial_calls: int
    """Those in which only some agents were due."""
    _delay_phase: int | None
    """Number of previous updates, up to a multiple of the period of delayed objectives; None if agents differ."""

    def __init__(
        self,
        policy: Policy,
        average: Callable[[Tensor], None] | None = None,
        stopwatch: Stopwatch | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """A `recorder` captures updates; `run.kernel: graph` makes one on a GPU, without `average`."""
        self.policy = policy
        self._algorithm = policy.algorithm
        self._average = average
        self._stopwatch = stopwatch or Stopwatch()
        members = [[policy.agents[index] for index in policy.places(stack)] for stack in policy.stacks]
        self.gradients, averaged = {}, {}
        for name in self._algorithm.networks:
            sizes = [stack.networks[name].parameters.flat.numel() for stack in policy.stacks]
            counts = [len(agents) for agents in members]
            flat = self.gradients[name] = torch.zeros(sum(sizes) + sum(counts), device=policy.generator.device)
            views, stacks = flat.split(sizes + counts), len(members)
            averaged[name] = list(zip(views[:stacks], views[stacks:], strict=True))
        self.stacks = [
            StackLearner(stack, agents, self._algorithm, {name: views[index] for name, views in averaged.items()})
            for index, (stack, agents) in enumerate(zip(policy.stacks, members, strict=True))
        ]
        self._checks_agents = False
        self._calls = self._partial_calls = 0
        # While all agents have the same phase, the host knows when a delayed objective is due without reading from the
        # device.
        objectives = self._algorithm.objectives
        period = math.lcm(*(objective.every for objective in objectives))
        phases = {agent.state.updates[objectives[0].network] % period for agent in policy.agents}
        self._delay_phase = int(phases.pop()) if len(phases) == 1 else None
        asked = policy.generator.device.type == "cuda" and self._algorithm.config.run.kernel == "graph"
        # A loss of a user's own may read numbers of the host, which a graph would never see change.
        is_known = type(self._algorithm).__module__.startswith("evorl.")
        if recorder is None and asked and is_known and average is None:
            recorder = Recorder(policy.generator)
        self._graphs = None if recorder is None else UpdateGraphs(recorder)

    def update(self, batch: Batch) -> UpdateResult:
        """Update all agents that are due, each from its own part of the batch; the batch is not modified.

        Reads nothing back from a GPU, to avoid synchronisation.
        """
        with self._stopwatch("learning"):
            # Full and partial updates are counted apart, so that agents due only in partial ones have metrics too.
            index = self._calls - self._partial_calls if batch.all_due else self._partial_calls
            objectives, phase = self._algorithm.objectives, self._delay_phase
            due = None if phase is None else tuple(phase % objective.every == 0 for objective in objectives)
            reported = tuple(
                is_due and index // objective.every % objective.report_every == 0
                for objective, is_due in zip(objectives, due or [True] * len(objectives), strict=True)
            )
            kind = UpdateKind(due, reported, self._checks_agents, batch.all_due)
            if self._graphs is None or batch.gradients:
                result = self._take(batch, kind)
            else:
                result = self._graphs.take(partial(self._take, kind=kind), batch, kind)
            self._calls += 1
            self._partial_calls += not batch.all_due
            if self._delay_phase is not None:
                self._delay_phase = self._delay_phase + 1 if batch.all_due else None
            self.policy.version += 1
            return result

    def _take(self, batch: Batch, kind: UpdateKind) -> UpdateResult:
        """Take the steps of an update, which reads no numbers of the host that change but its `kind`."""
        parts = self.policy.parts(batch)
        for stack, part in zip(self.stacks, parts, strict=True):
            stack.begin(part, kind.checks_agents)
        errors: list[Tensor | None] = [None] * len(parts)
        for number, (objective, reported) in enumerate(zip(self._algorithm.objectives, kind.reported, strict=True)):
            due = self._due(objective, None if kind.due is None else kind.due[number])
            if due is None:
                continue
            losses = self._descend(objective, parts, due, reported)
            if losses[0].columns:
                parts = [
                    replace(part, columns={**part.columns, **loss.columns})
                    for part, loss in zip(parts, losses, strict=True)
                ]
            errors = [
                before if loss.errors is None else loss.errors for loss, before in zip(losses, errors, strict=True)
            ]
        for stack in self.stacks:
            stack.end()
        return UpdateResult(self._joined([stack.active for stack in self.stacks]), self._joined(errors))

    def _joined(self, parts: list[Tensor | None]) -> Tensor | None:
        """Per-stack values in population order, or None if a stack has none."""
        values = [part for part in parts if part is not None]
        return self.policy.joined(values) if len(values) == len(parts) else None

    def metrics(self) -> UpdateMetrics:
        """The metrics accumulated over this generation's updates.

        With several objectives, loss and gradient norm are prefixed with the network's name.
        """
        # All names from the start: every rank must report the same number, even before its first update.
        count, objectives = len(self.policy.agents), self._algorithm.objectives
        prefixes = {
            objective.network: f"{objective.network}_" if len(objectives) > 1 else "" for objective in objectives
        }
        names = {(network, name): f"{prefix}{name}" for network, prefix in prefixes.items() for name in COMMON}
        sums = {name: np.zeros(count) for name in (*names.values(), *self._algorithm.metrics)}
        counts = {name: np.zeros(count) for name in sums}
        for stack in self.stacks:
            members = self.policy.places(stack.stack)
            for (network, metrics), values in stack.sums.items():
                *rows, agents = values.cpu().numpy()
                for name, row in zip(metrics, rows, strict=True):
                    sums[names.get((network, name), name)][members] += row
                    counts[names.get((network, name), name)][members] += agents
        updates = self.policy.joined([stack.updates for stack in self.stacks])
        return UpdateMetrics(updates.cpu().numpy().copy(), sums, counts)

    def to_agents(self) -> list[Agent]:
        """Write parameters, optimiser states and faults back into the agents."""
        for stack in self.stacks:
            for index, member in enumerate(self.policy.places(stack.stack)):
                stack.unload(index, self.policy.agents[member])
        return self.policy.agents

    def state_dict(self) -> Tensors:
        """Targets, optimisers, faults and metrics."""
        tensors = self._numbers()
        for index, stack in enumerate(self.stacks):
            tensors |= with_prefix(f"{index}/", stack.state_dict())
        return tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict` of a learner of the same agents. Raises UserError for another one."""
        stacks = [f"{index}/" for index in range(len(self.stacks))]
        numbers = self._numbers()
        load_like({name: state[name] for name in state if not name.startswith(tuple(stacks))}, numbers, WHERE)
        for prefix, stack in zip(stacks, self.stacks, strict=True):
            stack.load_state_dict(part_of(prefix, dict(state)))
        self._calls, self._partial_calls, checks, phase = (int(numbers[name]) for name in NUMBERS)
        self._checks_agents = bool(checks)
        self._delay_phase = None if phase < 0 else phase

    def _numbers(self) -> Tensors:
        phase = -1 if self._delay_phase is None else self._delay_phase
        values = self._calls, self._partial_calls, self._checks_agents, phase
        return numbers_to_tensors(**dict(zip(NUMBERS, map(int, values), strict=True)))

    def _due(self, objective: Objective, is_due: bool | None) -> list[Tensor | None] | None:
        """The agents [P] of each stack that take an objective's step now, or None if none does.

        `is_due` is None if the host does not know.
        """
        if objective.every == 1 or is_due is not None:
            return [stack.active for stack in self.stacks] if objective.every == 1 or is_due else None
        due = [stack.due(objective) for stack in self.stacks]
        # On a GPU this check would synchronise, so there a step with no agent due is computed without effect.
        return None if all(agents.device.type == "cpu" and not agents.any() for agents in due) else [*due]

    def _descend(
        self, objective: Objective, parts: list[Batch], due: list[Tensor | None], reported: bool
    ) -> list[Loss]:
        """Take one gradient step of an objective in every stack, by the agents [P] that are `due`.

        Metrics are kept only if `reported`.
        """
        name = objective.network
        losses = self.losses(objective, parts)
        means = [_means(loss, part) if reported else {} for loss, part in zip(losses, parts, strict=True)]
        flat = self.gradients[name]
        if self._average is not None:
            with self._stopwatch("communication"):
                self._average(flat)
        # On a CPU the sum of squares reveals non-finite values in 4 us, where the norms of all agents take 5 to 60.
        self._checks_agents = self._checks_agents or flat.device.type != "cpu" or not math.isfinite(flat.dot(flat))
        for stack, metrics, active in zip(self.stacks, means, due, strict=True):
            stack.step(objective, metrics, active, reported=reported, checks_agents=self._checks_agents)
        return losses

    @torch.enable_grad()  # An environment in this process may have disabled gradients.
    def losses(self, objective: Objective, parts: list[Batch]) -> list[Loss]:
        """Compute an objective's loss for every stack; write it and its gradient into its network's `gradients`."""
        name = objective.network
        if parts[0].gradients:
            self.gradients[name].copy_(parts[0].gradients[name])
            return [_given_loss(part) for part in parts]
        return [
            stack.networks[name].loss(objective, stack.stack, part, self.policy.generator)
            for stack, part in zip(self.stacks, parts, strict=True)
        ]


@torch.no_grad()
def _means(loss: Loss, batch: Batch) -> Tensors:
    """The batch means [P] of the loss and its metrics, without importance weights."""
    weight = batch.weight if batch.share is None else batch.share
    # One product for all of them, because call overhead dominates in small networks.
    values = {"loss": loss.per_sample, **loss.metrics()}
    means = torch.bmm(torch.stack(list(values.values()), 1), weight.unsqueeze(-1)).squeeze(-1)
    return dict(zip(values, means.unbind(1), strict=True))


def _given_loss(batch: Batch) -> Loss:
    """The loss [P, 1] that is included in a batch of gradients."""
    columns = dict(batch.columns)
    return Loss(columns.pop("loss"), lambda: columns)


def compute_gradients(learner: Learner, batch: Batch) -> Batch:
    """Compute the gradients of a batch, as a batch for another learner; the algorithm must have one objective.

    They are clipped here, each batch by itself, before the receiving learner takes their mean.
    """
    policy = learner.policy
    (objective,) = policy.algorithm.objectives
    parts = policy.parts(batch)
    losses = learner.losses(objective, parts)
    means = [_means(loss, part) for loss, part in zip(losses, parts, strict=True)]
    for stack, reported in zip(learner.stacks, means, strict=True):
        adam = stack.networks[objective.network].adam
        reported["gradient_norm"] = norms = adam.norms()
        if objective.max_grad_norm is not None:
            adam.scale_gradient(share_within(objective.max_grad_norm(stack.stack), norms))
    metrics = {name: policy.joined([values[name] for values in means]) for name in means[0]}
    return gradient_batch({objective.network: learner.gradients[objective.network]}, metrics)


def state_size(learner: Learner) -> int:
    """D, the number of values in the flat buffer."""
    return sum(values.numel() for values in _flats(learner))


@torch.no_grad()
def write_state(learner: Learner, flat: Tensor, updates: Tensor) -> None:
    """Write parameters and moments into `flat` [D], and the agents' optimiser steps into `updates` [N, P]."""
    for values, room in _apart(learner, flat):
        room.copy_(values)
    policy = learner.policy
    for row, name in zip(updates, policy.algorithm.networks, strict=True):
        row.copy_(policy.joined([stack.networks[name].adam.updates for stack in learner.stacks]))


def split_states(algorithm: Algorithm, states: Tensor) -> tuple[Tensors, Tensor]:
    """Split `states` into the acting states [P] by name and the optimiser steps [N, P] of N networks.

    Both are views of `states`. Only actors that share parameters receive optimiser steps.
    """
    names = algorithm.initial_state()
    return dict(zip(names, states[: len(names)], strict=True)), states[len(names) :]


@torch.no_grad()
def read_state(learner: Learner, flat: Tensor, updates: Tensor) -> None:
    """Load the state written by `write_state`."""
    for values, written in _apart(learner, flat):
        values.copy_(written)
    for row, name in zip(updates, learner.policy.algorithm.networks, strict=True):
        for stack in learner.stacks:
            stack.networks[name].adam.updates.copy_(row[stack.stack.members])


def _apart(learner: Learner, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The learner's flat tensors, each with its part of `flat` [D]; without those that are views of it already."""
    flats = _flats(learner)
    for values, part in zip(flats, flat.split([values.numel() for values in flats]), strict=True):
        if values.data_ptr() != part.data_ptr():
            yield values, part


def _flats(learner: Learner) -> list[Tensor]:
    """The flat parameters and observation statistics, followed by Adam's moments of every network."""
    adams = [network.adam for stack in learner.stacks for network in stack.networks.values()]
    return [
        learner.policy.flat.detach(),
        *(moments.flat for adam in adams for moments in (adam.exp_avg, adam.exp_avg_sq)),
    ]
