"""Agents as they learn: the targets, optimisers and gradients of a policy's stacks. Axes: P agents, B batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.algorithms import Objective
from evorl.networks.optimizer import StackedAdam
from evorl.networks.spec import TargetRule
from evorl.networks.stacked import Stack, StackedNetwork
from evorl.population.initial import not_finite
from evorl.population.policy import Policy
from evorl.system.timing import Stopwatch
from evorl.types import Agent, Batch, Loss, Tensors, UpdateResult


class NetworkLearner:
    """The optimiser of one network of a stack, and its target copy where it has one."""

    def __init__(self, network: StackedNetwork, rule: TargetRule | None, epsilon: float) -> None:
        self.network = network
        self.rule = rule
        self.target = network.target() if rule is not None else None
        flat = network.parameters
        self.adam = StackedAdam(dict(network.shapes.trained), flat.agents, epsilon, flat.flat.device)
        self._rate = torch.empty_like(flat.flat)
        self._rate_rows = flat.rows(self._rate)

    def load(self, name: str, agents: Sequence[Agent]) -> None:
        """Take over the agents' moments and targets."""
        self.adam.mean.load([agent.tensors[name]["mean"] for agent in agents])
        self.adam.square.load([agent.tensors[name]["square"] for agent in agents])
        if self.target is not None:
            self.target.parameters.load([agent.tensors[name]["target"] for agent in agents])
        self.adam.updates.copy_(torch.tensor([agent.state.updates[name] for agent in agents], dtype=torch.float64))

    def unload(self, name: str, index: int, agent: Agent) -> None:
        """Write what member `index` of the stack has learned into `agent`."""
        flats = {
            "parameters": self.network.parameters,
            "buffers": self.network.buffers,
            "mean": self.adam.mean,
            "square": self.adam.square,
        }
        if self.target is not None:
            flats["target"] = self.target.parameters
        shapes = self.network.true_shapes(agent.architectures[name])
        for role, flat in flats.items():
            own = {key: shape for key, shape in shapes.items() if key in flat.views}
            agent.tensors[name][role] = flat.unload(index, own)
        agent.state.updates[name] = float(self.adam.updates[index])

    def gradient(self, loss: Tensor, out: Tensor) -> None:
        """Write the flat gradient of the loss [P], summed over agents, into `out`."""
        leaves = list(self.network.leaves.values())
        gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True, materialize_grads=True)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=out)

    @torch.no_grad()
    def update_target(self, stack: Stack, active: Tensor) -> None:
        """Let the target copies of the agents that were updated (`active` [P]) follow by their rule."""
        if self.target is None or self.rule is None:
            return
        rate = self.rule.rate(stack.hyperparameters, self.adam.updates).float() * active
        for row in self._rate_rows:
            row.copy_(rate.unsqueeze(-1))
        self.target.parameters.flat.lerp_(self.network.parameters.flat, self._rate)


class Learner:
    """Updates the agents of a policy.

    `average` replaces a flat gradient by its mean over the ranks that hold the same agents; one call serves all stacks.
    """

    def __init__(
        self, policy: Policy, average: Callable[[Tensor], None] = lambda flat: None, stopwatch: Stopwatch | None = None
    ) -> None:
        self.policy = policy
        self._algorithm = policy.algorithm
        self._average = average
        self._stopwatch = stopwatch or Stopwatch()
        device, count = policy.generator.device, len(policy.agents)
        epsilon = self._algorithm.settings.adam_epsilon
        self._networks: list[dict[str, NetworkLearner]] = []
        for stack in policy.stacks:
            own = {
                name: NetworkLearner(stack.networks[name], spec.target, epsilon)
                for name, spec in self._algorithm.networks.items()
            }
            agents = [policy.agents[place] for place in policy.places(stack)]
            for name, network in own.items():
                network.load(name, agents)
                if network.target is not None:
                    stack.targets[name] = network.target
            self._networks.append(own)
        # The last places of each buffer carry every agent's divergence, so that one collective averages both.
        self._gradients = {
            name: torch.zeros(
                sum(stack.networks[name].parameters.flat.numel() for stack in policy.stacks) + count, device=device
            )
            for name in self._algorithm.networks
        }
        self._sums: list[dict[tuple[str, ...], Tensor]] = [{} for _ in policy.stacks]
        self._healthy = torch.ones(count, device=device)
        self._faults: dict[int, str] = {}
        self._count = 0
        # In double precision, as everything that counts: single stands still at 17 million.
        self._updates = torch.zeros(count, dtype=torch.float64, device=device)

    def update(self, batch: Batch) -> UpdateResult:
        """Update all agents that are due, each from its own part of the batch, which stays as it is."""
        with self._stopwatch("learning"):
            stacks = self.policy.stacks
            # Slicing costs 12 us, 1 % of an update of small networks; one stack needs none.
            parts = [batch]
            if len(stacks) > 1 or not isinstance(stacks[0].members, slice):
                parts = [batch.part(stack.members, stack.recurrent_units) for stack in stacks]
            healthy = self._healthy if self._faults else None
            active = [
                part.due.clone() if healthy is None else part.due * healthy[stack.members]
                for stack, part in zip(stacks, parts, strict=True)
            ]
            errors: list[Tensor | None] = [None] * len(stacks)
            due = [each for each in self._algorithm.objectives if self._count % each.every == 0]
            for objective in due:
                found = self._descend(objective, parts, active)
                errors = [one if one is not None else before for one, before in zip(found, errors, strict=True)]
            for stack, networks, own in zip(stacks, self._networks, active, strict=True):
                for name in {objective.network for objective in due}:
                    networks[name].update_target(stack, own)
            self._count += 1
            self.policy.version += 1
            joined = self.policy.joined(active)
            self._updates += joined
            known = [each for each in errors if each is not None]
            return UpdateResult(joined, self.policy.joined(known) if len(known) == len(stacks) else None)

    def metrics(self) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
        """Return sums of what losses report over each agent's updates in this generation, and their counts [P]."""
        # All of them from the start: every rank must give equally many, also one that has not learned yet.
        sums = {name: np.zeros(len(self.policy.agents)) for name in self._algorithm.metrics}
        for stack, own in zip(self.policy.stacks, self._sums, strict=True):
            places = self.policy.places(stack)
            for names, values in own.items():
                for name, value in zip(names, values.cpu().numpy().astype(np.float64), strict=True):
                    sums[name][places] += value
        return sums, self._updates.cpu().numpy().astype(np.float64)

    def to_agents(self) -> list[Agent]:
        """Return the agents with all that they have learned."""
        agents = self.policy.agents
        for stack, networks in zip(self.policy.stacks, self._networks, strict=True):
            for index, place in enumerate(self.policy.places(stack)):
                for name, network in networks.items():
                    network.unload(name, index, agents[place])
                agents[place].state.acting |= {name: float(values[index]) for name, values in stack.state.items()}
        for place, agent in enumerate(agents):
            agent.fault = self._faults.get(place) or not_finite(agent)
        return agents

    def _descend(self, objective: Objective, parts: list[Batch], active: list[Tensor]) -> list[Tensor | None]:
        """Take one gradient step of an objective in every stack; return the errors [P, B] that its losses give."""
        name, stacks, count = objective.network, self.policy.stacks, len(self.policy.agents)
        losses = [objective.loss(stack, part, self.policy.generator) for stack, part in zip(stacks, parts, strict=True)]
        networks = [own[name] for own in self._networks]
        flat = self._gradients[name]
        gradients = flat[:-count].split([network.network.parameters.flat.numel() for network in networks])
        divergences = flat[-count:].split([len(own) for own in active])
        for network, loss, gradient, divergence in zip(networks, losses, gradients, divergences, strict=True):
            network.gradient(loss.value, out=gradient)
            # A loss that is not a finite number makes its place NaN, on all ranks after the average.
            torch.mul(loss.value.detach(), 0.0, out=divergence)
            if loss.divergence is not None:
                divergence += loss.divergence
        with self._stopwatch("communication"):
            self._average(flat)
        # One number read back for all agents: 4 us where every agent's norm takes 52 (4 agents, 5,000 values each).
        if not math.isfinite(flat.sum()):
            for stack, network, own, gradient, divergence in zip(
                stacks, networks, active, gradients, divergences, strict=True
            ):
                self._quarantine(stack, network.adam, own, gradient, divergence)
        for index, (stack, network, loss) in enumerate(zip(stacks, networks, losses, strict=True)):
            if loss.limit is not None:
                active[index].mul_(divergences[index] <= loss.limit)
            limit = None if objective.max_grad_norm is None else objective.max_grad_norm(stack)
            network.adam.step(
                network.network.parameters.flat, gradients[index], objective.learning_rate(stack), active[index], limit
            )
            self._add_metrics(self._sums[index], loss, active[index])
        return [loss.errors for loss in losses]

    @torch.no_grad()
    def _quarantine(self, stack: Stack, adam: StackedAdam, active: Tensor, gradient: Tensor, mark: Tensor) -> None:
        """Keep agents whose gradient or `mark` [P] is not finite from this update and from all that follow."""
        bad = ~(adam.norms(gradient).isfinite() & mark.isfinite())
        places = self.policy.places(stack)
        for index in (bad & (active > 0)).nonzero().flatten().tolist():
            place = places[index]
            self._faults[place] = f"loss or gradient not finite at update {int(self._updates[place]) + 1}"
            self._healthy[place] = 0.0
        active.mul_(~bad)
        # A gradient that is not a number would spoil even moments that it has no weight in.
        for row in adam.rows(gradient):
            row.masked_fill_(bad.unsqueeze(-1), 0.0)

    @torch.no_grad()
    def _add_metrics(self, sums: dict[tuple[str, ...], Tensor], loss: Loss, active: Tensor) -> None:
        metrics: Tensors = {"loss": loss.value, **loss.metrics}
        names = tuple(metrics)
        if names not in sums:
            sums[names] = torch.zeros(len(names), len(active), dtype=torch.float64, device=active.device)
        values = torch.stack(list(metrics.values()))
        if self._faults:
            values = values.where(active > 0, 0.0)
        sums[names].addcmul_(values, active)
