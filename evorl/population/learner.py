"""Learning of a policy's stacks: target networks, optimisers, gradients, and the state shared by several processes.

Axes: P agents, B batch, D all parameters and moments, N networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from evorl.algorithms import Algorithm, Objective
from evorl.networks.optimizer import StackedAdam
from evorl.networks.stack import Stack, StackedNetwork, TargetRule
from evorl.population.initial import not_finite
from evorl.population.policy import Policy
from evorl.replay.received import gradient_batch
from evorl.system.formats import load_like, numbers_to_tensors, part_of, with_prefix
from evorl.system.stopwatch import Stopwatch
from evorl.types import (
    EXP_AVG,
    EXP_AVG_SQ,
    Agent,
    Batch,
    Loss,
    Roles,
    Tensors,
    UpdateMetrics,
    UpdateResult,
    UserError,
)

COMMON = ("loss", "gradient_norm")
"""Metrics reported for every objective."""
GUARDED = "loss", "gradient norm"
"""The numbers of an agent that must be finite for it to take a step."""
AGREED = "loss", "divergence"
"""Each agent's numbers that go with a flat gradient, so that all ranks decide alike who takes a step."""
NUMBERS = ("calls", "partial_calls", "common_updates", "checks_agents", "delay_phase")
"""The whole numbers in a state."""
WHERE, SUMS = "the learner", "sums/"
"""The name of a state in errors, and the prefix of its metrics, which are named STACK/NETWORK/METRIC,METRIC."""


class NetworkLearner:
    """Optimiser of one network of a stack, with its target network if it has one."""

    def __init__(
        self,
        network: StackedNetwork,
        rule: TargetRule | None,
        epsilon: float,
        gradient: Tensor,
    ) -> None:
        """Create an optimiser that uses `gradient` [D] as memory for the flat gradient."""
        self.network = network
        self.rule = rule
        self.target = network.target() if rule is not None else None
        self.gradient = gradient
        self.adam = StackedAdam(network.parameters, gradient, epsilon, network.network.kernel)
        self._tau = torch.zeros(0)

    def load(self, name: str, agents: Sequence[Agent]) -> None:
        """Load the agents' Adam moments and target parameters, or zeros if only a remote learner has them."""
        roles: list[Roles] = [agent.tensors.get(name, {}) for agent in agents]
        self.adam.exp_avg.load([each.get(EXP_AVG, {}) for each in roles])
        self.adam.exp_avg_sq.load([each.get(EXP_AVG_SQ, {}) for each in roles])
        if self.target is not None:
            self.target.parameters.load([each.get("target", {}) for each in roles])
        self.adam.load(torch.tensor([agent.state.updates[name] for agent in agents], dtype=torch.float64))

    def unload(self, name: str, index: int, agent: Agent) -> None:
        """Write the parameters, moments and target of stack member `index` into `agent`."""
        flats = {
            "parameters": self.network.parameters,
            "buffers": self.network.buffers,
            EXP_AVG: self.adam.exp_avg,
            EXP_AVG_SQ: self.adam.exp_avg_sq,
        }
        if self.target is not None:
            flats["target"] = self.target.parameters
        shapes = self.network.true_shapes(agent.architectures[name])
        for role, flat in flats.items():
            own = {key: shape for key, shape in shapes.items() if key in flat.views}
            agent.tensors[name][role] = flat.unload(index, own)
        agent.state.updates[name] = float(self.adam.updates[index])

    def loss(self, objective: Objective, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Compute an objective's loss, and its gradient into `gradient`."""
        loss = objective.loss(stack, batch, generator)
        self.gradient.copy_(self.network.gradient(loss.per_sample, batch.weight))
        return loss

    def step(self, stack: Stack, rate: Tensor, active: Tensor | None, clip: Tensor | None) -> None:
        """Take an optimiser step with learning rates [P] for `active` [P] agents, or all; then update the target.

        `clip` [P] is a factor for the gradient.
        """
        self.adam.step(rate, active, clip)
        if self.target is not None and self.rule is not None:
            changes = active is not None or self.rule.changes
            if changes or not len(self._tau):
                tau = self.rule.rate(stack.hyperparameters, self.adam.updates).float()
                self._tau = tau if active is None else tau * active
            self.adam.follow(self.target.parameters, self._tau)
            if changes:
                self._tau = self._tau[:0]


class Learner:
    """Updates the agents of a policy.

    `average` replaces a flat gradient by its mean over the ranks that hold the same agents, in one call for all stacks.
    """

    policy: Policy
    """The stacks that learn; their parameters change in place."""
    networks: list[dict[str, NetworkLearner]]
    """Optimiser and target of each network, for each stack."""
    gradients: Tensors
    """Each network's flat gradient in all stacks, then every agent's `AGREED`, so one collective averages all."""
    _algorithm: Algorithm
    _losses: dict[str, Sequence[Tensor]]
    """Views of `gradients`: the losses [P] of each stack, by network."""
    _divergences: dict[str, Sequence[Tensor]]
    """Views of `gradients`: the divergences [P] of each stack, by network."""
    _sums: list[dict[tuple[str, tuple[str, ...]], Tensor]]
    """For each stack, by network and names of metrics: their sums and the count of agents, [metrics + 1, P]."""
    _healthy: list[Tensor]
    """For each stack, 1 or 0 [P]: an agent with non-finite values stops learning."""
    _faults: list[Tensor]
    """For each stack, the update that made an agent's loss and gradient norm non-finite [2, P]; 0 where finite."""
    _checks_agents: bool
    """True once a gradient may have held non-finite values: then those of each agent are checked in every update."""
    _calls: int
    """Calls of `update`."""
    _partial_calls: int
    """Those in which only some agents were due."""
    _common_updates: int
    """Updates that all agents made; `_updates` [P] are those that only some did."""
    _updates: Tensor
    _delay_phase: int | None
    """Number of previous updates, up to a multiple of the period of delayed objectives; None if agents differ."""

    def __init__(
        self,
        policy: Policy,
        average: Callable[[Tensor], None] = lambda flat: None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.policy = policy
        self._algorithm = policy.algorithm
        self._average = average
        self._stopwatch = stopwatch or Stopwatch()
        device, count = policy.generator.device, len(policy.agents)
        sizes = {
            name: [stack.networks[name].parameters.flat.numel() for stack in policy.stacks]
            for name in self._algorithm.networks
        }
        parts = {name: [*own, *[count] * len(AGREED)] for name, own in sizes.items()}
        self.gradients = {name: torch.zeros(sum(own), device=device) for name, own in parts.items()}
        members = [len(policy.places(stack)) for stack in policy.stacks]
        gradients = {name: flat.split(parts[name]) for name, flat in self.gradients.items()}
        self._losses = {name: own[-2].split(members) for name, own in gradients.items()}
        self._divergences = {name: own[-1].split(members) for name, own in gradients.items()}
        self.networks = [
            self._network_learners(stack, {name: parts[index] for name, parts in gradients.items()})
            for index, stack in enumerate(policy.stacks)
        ]
        self._sums = [{} for _ in policy.stacks]
        self._healthy = [torch.ones(size, device=device) for size in members]
        self._checks_agents = False
        self._calls = self._partial_calls = self._common_updates = 0
        # Counters are float64 because float32 stops counting at 17 million.
        self._faults = [torch.zeros(2, size, dtype=torch.float64, device=device) for size in members]
        self._updates = torch.zeros(count, dtype=torch.float64, device=device)
        # While all agents have the same phase, the host knows when a delayed objective is due without reading from the
        # device.
        counter, period = self._counter, math.lcm(*(each.every for each in self._algorithm.objectives))
        phases = {agent.state.updates[counter] % period for agent in policy.agents}
        self._delay_phase = int(phases.pop()) if len(phases) == 1 else None

    @property
    def _counter(self) -> str:
        """The network whose optimiser steps count as an agent's updates: that of the first objective."""
        return self._algorithm.objectives[0].network

    def _network_learners(self, stack: Stack, gradients: Tensors) -> dict[str, NetworkLearner]:
        """A stack's NetworkLearners by network, with the agents' moments and targets loaded."""
        agents = [self.policy.agents[place] for place in self.policy.places(stack)]
        epsilon, learners = self._algorithm.settings.adam_epsilon, {}
        for name, spec in self._algorithm.networks.items():
            learner = NetworkLearner(stack.networks[name], spec.target, epsilon, gradients[name])
            learner.load(name, agents)
            if learner.target is not None:
                stack.target_networks[name] = learner.target
            learners[name] = learner
        return learners

    def update(self, batch: Batch) -> UpdateResult:
        """Update all agents that are due, each from its own part of the batch; the batch is not modified.

        Reads nothing back from a GPU, to avoid synchronisation.
        """
        with self._stopwatch("learning"):
            stacks, parts = self.policy.stacks, self.policy.parts(batch)
            active: list[Tensor | None] = [None] * len(stacks)
            if self._checks_agents or not batch.all_due:
                active = [part.due * health for part, health in zip(parts, self._healthy, strict=True)]
            errors: list[Tensor | None] = [None] * len(stacks)
            # Full and partial updates are counted apart, so that agents due only in partial ones have metrics too.
            index = self._calls - self._partial_calls if batch.all_due else self._partial_calls
            for objective in self._algorithm.objectives:
                taking = active if objective.every == 1 else self._turns(objective, active)
                if taking is None:
                    continue
                reported = index // objective.every % objective.report_every == 0
                found, taking = self._descend(objective, parts, taking, reported)
                errors = [one if one is not None else before for one, before in zip(found, errors, strict=True)]
                if objective.every == 1:
                    active = taking
                elif self._checks_agents:
                    # An agent with non-finite values in a delayed step takes no further step of this update.
                    active = [h if own is None else own * h for own, h in zip(active, self._healthy, strict=True)]
            self._calls += 1
            self._partial_calls += not batch.all_due
            if self._delay_phase is not None:
                self._delay_phase = self._delay_phase + 1 if batch.all_due else None
            self.policy.version += 1
            errors_of_stacks = [each for each in errors if each is not None]
            joined_errors = self.policy.joined(errors_of_stacks) if len(errors_of_stacks) == len(stacks) else None
            if all(each is None for each in active):
                self._common_updates += 1
                return UpdateResult(None, joined_errors)
            joined = self.policy.joined(
                [health if own is None else own for own, health in zip(active, self._healthy, strict=True)]
            )
            self._updates += joined
            return UpdateResult(joined, joined_errors)

    def metrics(self) -> UpdateMetrics:
        """The metrics accumulated over this generation's updates.

        With several objectives, loss and gradient norm are prefixed with the network's name.
        """
        # All names from the start: every rank must report the same number, even before its first update.
        count, objectives = len(self.policy.agents), self._algorithm.objectives
        names = {(each.network, name): self._reported(each.network, name) for each in objectives for name in COMMON}
        sums = {name: np.zeros(count) for name in (*names.values(), *self._algorithm.metrics)}
        counts = {name: np.zeros(count) for name in sums}
        for stack, own in zip(self.policy.stacks, self._sums, strict=True):
            places = self.policy.places(stack)
            for (network, given), values in own.items():
                *rows, counted = values.cpu().numpy()
                for name, row in zip(given, rows, strict=True):
                    sums[names.get((network, name), name)][places] += row
                    counts[names.get((network, name), name)][places] += counted
        return UpdateMetrics(self._common_updates + self._updates.cpu().numpy(), sums, counts)

    def _reported(self, network: str, name: str) -> str:
        return name if len(self._algorithm.objectives) == 1 else f"{network}_{name}"

    def to_agents(self) -> list[Agent]:
        """Write parameters, optimiser states and faults back into the agents."""
        agents = self.policy.agents
        for stack, networks, faults in zip(self.policy.stacks, self.networks, self._faults, strict=True):
            for index, place in enumerate(self.policy.places(stack)):
                agent = agents[place]
                for name, network in networks.items():
                    network.unload(name, index, agent)
                agent.state.acting |= {name: float(values[index]) for name, values in stack.state.items()}
                updates = faults[:, index]
                wrong = " and ".join(name for name, update in zip(GUARDED, updates, strict=True) if update)
                fault = f"{wrong} not finite at update {int(updates.max())}" if wrong else None
                agent.fault = fault or not_finite(agent)
        return agents

    def state_dict(self) -> Tensors:
        """Targets, optimisers, faults and metrics."""
        tensors = self._changing()
        for index, own in enumerate(self._sums):
            tensors |= {f"{SUMS}{index}/{network}/{','.join(names)}": sums for (network, names), sums in own.items()}
        return tensors

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict` of a learner of the same agents. Raises UserError for another one."""
        tensors = self._changing()
        load_like({name: value for name, value in state.items() if not name.startswith(SUMS)}, tensors, WHERE)
        for name, value in state.items():
            if name.startswith(SUMS):
                self._load_sums(name, value)
        for index, stack in enumerate(self.networks):
            for name, network in stack.items():
                network.adam.load_state_dict(part_of(f"{index}/{name}/adam/", tensors))
        numbers = (int(tensors[name]) for name in NUMBERS)
        self._calls, self._partial_calls, self._common_updates, checks, phase = numbers
        self._checks_agents = bool(checks)
        self._delay_phase = None if phase < 0 else phase

    def _changing(self) -> Tensors:
        """The state without the metrics, whose names the losses decide."""
        phase = -1 if self._delay_phase is None else self._delay_phase
        numbers = self._calls, self._partial_calls, self._common_updates, int(self._checks_agents), phase
        tensors = {"updates": self._updates, **numbers_to_tensors(**dict(zip(NUMBERS, numbers, strict=True)))}
        for index, stack in enumerate(self.networks):
            tensors |= {f"{index}/healthy": self._healthy[index], f"{index}/faults": self._faults[index]}
            for name, network in stack.items():
                tensors |= with_prefix(f"{index}/{name}/adam/", network.adam.state_dict())
                if network.target is not None:
                    tensors[f"{index}/{name}/target"] = network.target.parameters.flat
        return tensors

    def _load_sums(self, name: str, values: Tensor) -> None:
        """Load the accumulated metrics of one objective and stack. Raises UserError if no loss has such metrics."""
        index, network, given = [*name.removeprefix(SUMS).split("/", 2), "", ""][:3]
        names, stacks = tuple(given.split(",")), {str(number): number for number in range(len(self._sums))}
        if index not in stacks or network not in self._algorithm.networks:
            raise UserError(f"{WHERE}: metrics {name[:80]!r} are of no network")
        if not {*names} <= {*COMMON, *self._algorithm.metrics}:
            raise UserError(f"{WHERE}: metrics {name[:80]!r} are not those of {self._algorithm.settings.name}")
        healthy = self._healthy[stacks[index]]
        sums = torch.zeros(len(names) + 1, len(healthy), dtype=torch.float64, device=healthy.device)
        load_like({name: values}, {name: sums}, WHERE)
        self._sums[stacks[index]][network, names] = sums

    def _turns(self, objective: Objective, active: list[Tensor | None]) -> list[Tensor | None] | None:
        """The `active` agents [P] of each stack that take a delayed step now, or None if none does.

        An agent takes it in the first of every `every` of its own updates, as counted by the first objective.
        """
        if self._delay_phase is not None:
            return active if self._delay_phase % objective.every == 0 else None
        taking: list[Tensor | None] = []
        for networks, own, health in zip(self.networks, active, self._healthy, strict=True):
            turn = torch.remainder(networks[self._counter].adam.updates - 1, objective.every) == 0
            taking.append((health if own is None else own) * turn)
        # On a GPU this check would synchronise, so there a step with no agent due is computed without effect.
        if all(each.device.type == "cpu" and not each.any() for each in taking if each is not None):
            return None
        return taking

    def _descend(
        self, objective: Objective, parts: list[Batch], active: list[Tensor | None], reported: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Take one gradient step of an objective in every stack, by its `active` agents [P].

        Returns the losses' errors [P, B] for priorities, and for each stack the mask [P] of agents that took the step.
        Metrics are kept only if `reported`.
        """
        name, stacks = objective.network, self.policy.stacks
        networks, divergences = [own[name] for own in self.networks], self._divergences[name]
        losses = self.losses(objective, parts)
        metrics: list[Tensors] = [{}] * len(stacks)
        for index, (loss, part) in enumerate(zip(losses, parts, strict=True)):
            if reported or loss.divergence is not None:
                metrics[index] = _means(loss, part)
            if loss.divergence is not None:
                divergences[index].copy_(metrics[index][loss.divergence])
        flat = self.gradients[name]
        with self._stopwatch("communication"):
            self._average(flat)
        # On a CPU the sum of squares reveals non-finite values and norms in 4 us, where all norms take 25 to 60.
        self._checks_agents = self._checks_agents or flat.device.type != "cpu" or not math.isfinite(flat.dot(flat))
        took: list[Tensor | None] = []
        for index, (stack, network, loss, own) in enumerate(zip(stacks, networks, losses, active, strict=True)):
            divergence, limit = divergences[index], objective.max_grad_norm
            # Norms cost 25 to 60 us; where nothing reads them, any tensor stands in.
            norms = network.adam.norms() if self._checks_agents or limit is not None or reported else divergence
            if self._checks_agents:
                own = self._quarantine(index, own, torch.stack((self._losses[name][index] + divergence, norms)))
            if loss.limit is not None:
                own = (self._healthy[index] if own is None else own) * (divergence <= loss.limit)
            clip = None if limit is None else _share_within(limit(stack), norms)
            network.step(stack, objective.learning_rate(stack), own, clip)
            if reported:
                # A gradient from another worker comes with the norm that it had there.
                self._add_metrics(index, objective, {"gradient_norm": norms, **metrics[index]}, own)
            took.append(own)
        return [loss.errors for loss in losses], took

    @torch.enable_grad()  # An environment in this process may have disabled gradients.
    def losses(self, objective: Objective, parts: list[Batch]) -> list[Loss]:
        """Compute an objective's loss for every stack; write it and its gradient into its network's `gradients`."""
        name = objective.network
        if parts[0].gradients:
            self.gradients[name].copy_(parts[0].gradients[name])
            return [_given_loss(part) for part in parts]
        losses = []
        for own, stack, part, mean in zip(self.networks, self.policy.stacks, parts, self._losses[name], strict=True):
            loss = own[name].loss(objective, stack, part, self.policy.generator)
            with torch.no_grad():
                torch.bmm(loss.per_sample.unsqueeze(1), part.weight.unsqueeze(2), out=mean.view(-1, 1, 1))
            losses.append(loss)
        return losses

    def _quarantine(self, index: int, active: Tensor | None, numbers: Tensor) -> Tensor:
        """Exclude agents with non-finite `numbers` [2, P], those of `GUARDED`, from the `active` ones [P] of a stack.

        Excluded agents skip this update and all later ones.
        """
        health, faults = self._healthy[index], self._faults[index]
        due = health if active is None else active * health
        wrong = (due > 0) & ~numbers.isfinite()
        updates = self._common_updates + self._updates[self.policy.stacks[index].members]
        faults.copy_(torch.where(wrong, updates + 1, faults))
        bad = wrong.any(0)
        health.masked_fill_(bad, 0.0)
        return due.masked_fill(bad, 0.0)

    def _add_metrics(self, index: int, objective: Objective, means: Tensors, active: Tensor | None) -> None:
        """Accumulate the metrics of an update, and the number of agents [P] counted."""
        key = objective.network, tuple(means)
        values = torch.stack(list(means.values()))
        counted = self._healthy[index] if active is None else active
        if active is not None:
            values = values.where(active > 0, 0.0)
        if key not in self._sums[index]:
            self._sums[index][key] = torch.zeros(
                len(means) + 1, len(counted), dtype=torch.float64, device=values.device
            )
        self._sums[index][key] += torch.cat((values * counted, counted.unsqueeze(0)))


@torch.no_grad()
def _means(loss: Loss, batch: Batch) -> Tensors:
    """The batch means [P] of the loss and its metrics, without importance weights."""
    weight = batch.weight if batch.share is None else batch.share
    # One product for all of them, because call overhead dominates in small networks.
    values = {"loss": loss.per_sample, **loss.metrics()}
    means = torch.bmm(torch.stack(list(values.values()), 1), weight.unsqueeze(-1)).squeeze(-1)
    return dict(zip(values, means.unbind(1), strict=True))


def _share_within(limit: Tensor, norms: Tensor) -> Tensor:
    """The clipping factors [P] that limit gradient norms [P] to `limit` [P]; NaN for a norm that is not finite.

    A factor of 0, which is limit / inf, would pass for a gradient of 0.
    """
    return torch.add(limit / torch.maximum(norms, limit), norms, alpha=0.0)


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
    for stack, own, reported in zip(policy.stacks, learner.networks, means, strict=True):
        reported["gradient_norm"] = norms = own[objective.network].adam.norms()
        if objective.max_grad_norm is not None:
            own[objective.network].adam.scale_gradient(_share_within(objective.max_grad_norm(stack), norms))
    metrics = {name: policy.joined([each[name] for each in means]) for name in means[0]}
    return gradient_batch({objective.network: learner.gradients[objective.network]}, metrics)


def state_size(learner: Learner) -> int:
    """D, the number of values in the flat buffer."""
    return sum(values.numel() for values in _flats(learner))


@torch.no_grad()
def write_state(learner: Learner, flat: Tensor, updates: Tensor) -> None:
    """Write parameters and moments into `flat` [D], and the agents' optimiser steps into `updates` [N, P]."""
    place = 0
    for values in _flats(learner):
        # The parameters may already be views of this buffer.
        if values.data_ptr() != flat[place:].data_ptr():
            flat[place : place + values.numel()] = values
        place += values.numel()
    policy = learner.policy
    for room, name in zip(updates, policy.algorithm.networks, strict=True):
        room.copy_(policy.joined([own[name].adam.updates for own in learner.networks]))


def split_states(algorithm: Algorithm, states: Tensor) -> tuple[Tensors, Tensor]:
    """Split `states` into the acting states [P] by name and the optimiser steps [N, P] of N networks.

    Both are views of `states`. Only actors that share parameters receive optimiser steps.
    """
    names = algorithm.initial_state()
    return dict(zip(names, states[: len(names)], strict=True)), states[len(names) :]


@torch.no_grad()
def read_state(learner: Learner, flat: Tensor, updates: Tensor) -> None:
    """Load the state written by `write_state`."""
    place = 0
    for values in _flats(learner):
        if values.data_ptr() != flat[place:].data_ptr():
            values.copy_(flat[place : place + values.numel()])
        place += values.numel()
    for taken, name in zip(updates, learner.policy.algorithm.networks, strict=True):
        for own, stack in zip(learner.networks, learner.policy.stacks, strict=True):
            own[name].adam.load(taken[stack.members])


def _flats(learner: Learner) -> list[Tensor]:
    """The flat parameters and observation statistics, followed by Adam's moments of every network."""
    adams = [network.adam for own in learner.networks for network in own.values()]
    return [
        learner.policy.flat.detach(),
        *(moments.flat for adam in adams for moments in (adam.exp_avg, adam.exp_avg_sq)),
    ]
