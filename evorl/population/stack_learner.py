"""Learning of one stack: its networks' optimisers and targets, and which of its agents take a step.

Axes: P agents of the stack, B batch, D values of a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evorl.algorithms import Algorithm, Objective
from evorl.networks.optimizer import StackedAdam
from evorl.networks.stack import Stack, StackedNetwork, TargetRule
from evorl.population.initial import not_finite
from evorl.system.formats import load_like, part_of, with_prefix
from evorl.types.agents import EXP_AVG, EXP_AVG_SQ, Agent
from evorl.types.batches import Batch, Loss
from evorl.types.tensors import Roles, Tensors

COMMON = ("loss", "gradient_norm")
"""Metrics reported for every objective."""
GUARDED = "loss", "gradient norm"
"""The numbers of an agent that must be finite for it to take a step."""
WHERE, SUMS = "the learner", "sums/"
"""The name of a state in errors, and the prefix of its metrics, which are named NETWORK/METRIC,METRIC."""


class NetworkLearner:
    """Optimiser of one network of a stack, with its target network if it has one."""

    def __init__(
        self,
        network: StackedNetwork,
        rule: TargetRule | None,
        epsilon: float,
        gradient: Tensor,
        mean_loss: Tensor,
    ) -> None:
        """`gradient` [D] and `mean_loss` [P] are memory for what ranks average."""
        self.network = network
        self.rule = rule
        self.target = network.target() if rule is not None else None
        self.gradient = gradient
        self.mean_loss = mean_loss
        self.adam = StackedAdam(network.parameters, gradient, epsilon, network.network.kernel)

    def load(self, name: str, agents: Sequence[Agent]) -> None:
        """Load the agents' Adam moments and target parameters, or zeros if only a remote learner has them."""
        roles: list[Roles] = [agent.tensors.get(name, {}) for agent in agents]
        self.adam.exp_avg.load([tensors.get(EXP_AVG, {}) for tensors in roles])
        self.adam.exp_avg_sq.load([tensors.get(EXP_AVG_SQ, {}) for tensors in roles])
        if self.target is not None:
            self.target.parameters.load([tensors.get("target", {}) for tensors in roles])
        self.adam.updates.copy_(torch.tensor([agent.state.updates[name] for agent in agents], dtype=torch.float64))

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
            agent.tensors[name][role] = flat.unload(index, {key: shapes[key] for key in shapes if key in flat.views})
        agent.state.updates[name] = float(self.adam.updates[index])

    def loss(self, objective: Objective, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Compute an objective's loss; write its mean into `mean_loss` and its gradient into `gradient`."""
        loss = objective.loss(stack, batch, generator)
        self.gradient.copy_(self.network.gradient(loss.per_sample, batch.weight))
        with torch.no_grad():
            torch.linalg.vecdot(loss.per_sample, batch.weight, out=self.mean_loss)
        return loss

    def step(self, stack: Stack, rate: Tensor, active: Tensor | None, clip: Tensor | None) -> None:
        """Take an optimiser step with learning rates [P] for `active` [P] agents, or all; then update the target.

        `clip` [P] is a factor for the gradient.
        """
        self.adam.step(rate, active, clip)
        if self.target is not None and self.rule is not None:
            tau = self.rule.rate(stack.hyperparameters, self.adam.updates).float()
            self.adam.follow(self.target.parameters, tau if active is None else tau * active)


class StackLearner:
    """Updates the agents of one stack."""

    networks: dict[str, NetworkLearner]
    """Optimiser and target of each network."""
    active: Tensor | None
    """The agents [P], 1 or 0, that take the current update; None is all of them."""
    updates: Tensor
    """Updates [P] that each agent has taken; float64, since float32 stops counting at 17 million."""
    sums: dict[tuple[str, tuple[str, ...]], Tensor]
    """By network and names of metrics: their sums and the count of agents, [metrics + 1, P]."""
    _healthy: Tensor
    """1 or 0 [P]: an agent with non-finite values stops learning."""
    _faults: Tensor
    """The update that made an agent's loss and gradient norm non-finite [2, P]; 0 where finite."""

    def __init__(
        self, stack: Stack, agents: Sequence[Agent], algorithm: Algorithm, averaged: Mapping[str, tuple[Tensor, Tensor]]
    ) -> None:
        """`averaged` holds for each network the memory of its gradient [D] and mean loss [P]."""
        self.stack, self._algorithm, self.networks = stack, algorithm, {}
        for name, spec in algorithm.networks.items():
            gradient, mean_loss = averaged[name]
            learner = NetworkLearner(
                stack.networks[name], spec.target, algorithm.settings.adam_epsilon, gradient, mean_loss
            )
            learner.load(name, agents)
            if learner.target is not None:
                stack.target_networks[name] = learner.target
            self.networks[name] = learner
        device = gradient.device
        self._healthy = torch.ones(len(agents), device=device)
        self._faults = torch.zeros(2, len(agents), dtype=torch.float64, device=device)
        self.updates = torch.zeros(len(agents), dtype=torch.float64, device=device)
        self.active, self.sums, self._applied = None, {}, False

    def begin(self, batch: Batch, checks_agents: bool) -> None:
        """Begin an update of the agents that are due, or all."""
        self.active = batch.due * self._healthy if checks_agents or not batch.all_due else None
        self._applied = batch.applied

    def end(self) -> None:
        """Count the update."""
        self.updates += 1 if self.active is None else self.active

    def due(self, objective: Objective) -> Tensor:
        """The active agents [P] that take a delayed step: in the first of every `every` of their own updates.

        The optimiser steps of the first objective's network count them.
        """
        counter = self.networks[self._algorithm.objectives[0].network]
        turn = torch.remainder(counter.adam.updates - 1, objective.every) == 0
        return (self._healthy if self.active is None else self.active) * turn

    def step(
        self,
        objective: Objective,
        metrics: Tensors,
        active: Tensor | None,
        *,
        reported: bool,
        checks_agents: bool,
    ) -> None:
        """Take the gradient step of an objective by its `active` agents [P], and count `metrics` [P] if `reported`."""
        network, limit = self.networks[objective.network], objective.max_grad_norm
        # Norms cost 25 to 60 us by torch; where nothing reads them, any tensor stands in.
        needs_norms = checks_agents or limit is not None or reported
        norms = network.adam.norms() if needs_norms else network.mean_loss
        if checks_agents:
            active = self._quarantine(active, torch.stack((network.mean_loss, norms)))
        if not self._applied:
            clip = None if limit is None else share_within(limit(self.stack), norms)
            network.step(self.stack, objective.learning_rate(self.stack), active, clip)
        if reported:
            # A gradient from another worker comes with the norm that it had there.
            self._add_metrics(objective, {"gradient_norm": norms, **metrics}, active)
        if objective.every == 1:
            self.active = active
        elif checks_agents:
            # An agent with non-finite values in a delayed step takes no further step of this update.
            self.active = self._healthy if self.active is None else self.active * self._healthy

    def _quarantine(self, active: Tensor | None, numbers: Tensor) -> Tensor:
        """Exclude agents with non-finite `numbers` [2, P], those of `GUARDED`, from the `active` ones [P].

        Excluded agents skip this update and all later ones.
        """
        due = self._healthy if active is None else active * self._healthy
        wrong = (due > 0) & ~numbers.isfinite()
        self._faults.copy_(torch.where(wrong, self.updates + 1, self._faults))
        bad = wrong.any(0)
        self._healthy.masked_fill_(bad, 0.0)
        return due.masked_fill(bad, 0.0)

    def _add_metrics(self, objective: Objective, means: Tensors, active: Tensor | None) -> None:
        """Accumulate the metrics of an update, and the number of agents [P] counted."""
        key, values = (objective.network, tuple(means)), torch.stack(list(means.values()))
        counts = self._healthy if active is None else active
        if active is not None:
            values = values.where(active > 0, 0.0)
        if key not in self.sums:
            self.sums[key] = self._no_sums(len(means))
        self.sums[key] += torch.cat((values * counts, counts.unsqueeze(0)))

    def _no_sums(self, metrics: int) -> Tensor:
        return torch.zeros(metrics + 1, len(self._healthy), dtype=torch.float64, device=self._healthy.device)

    def unload(self, index: int, agent: Agent) -> None:
        """Write parameters, optimiser states and faults of the stack's member `index` into `agent`."""
        for name, network in self.networks.items():
            network.unload(name, index, agent)
        agent.state.acting |= {name: float(values[index]) for name, values in self.stack.state.items()}
        updates = self._faults[:, index]
        wrong = " and ".join(name for name, update in zip(GUARDED, updates, strict=True) if update)
        fault = f"{wrong} not finite at update {int(updates.max())}" if wrong else None
        agent.fault = fault or not_finite(agent)

    def state_dict(self) -> Tensors:
        """Targets, optimisers, faults and metrics."""
        sums = {f"{SUMS}{network}/{','.join(names)}": values for (network, names), values in self.sums.items()}
        return self._numbers() | sums

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict` of the same agents. Raises UserError for another one."""
        tensors = self._numbers()
        load_like({name: value for name, value in state.items() if not name.startswith(SUMS)}, tensors, WHERE)
        for name, network in self.networks.items():
            network.adam.load_state_dict(part_of(f"{name}/adam/", tensors))
        for name, value in state.items():
            if name.startswith(SUMS):
                objective, _, listed = name.removeprefix(SUMS).partition("/")
                names = tuple(listed.split(","))
                sums = self.sums[objective, names] = self._no_sums(len(names))
                load_like({name: value}, {name: sums}, WHERE)

    def _numbers(self) -> Tensors:
        """The state without the metrics, whose names the losses decide."""
        tensors = {"healthy": self._healthy, "faults": self._faults, "updates": self.updates}
        for name, network in self.networks.items():
            tensors |= with_prefix(f"{name}/adam/", network.adam.state_dict())
            if network.target is not None:
                tensors[f"{name}/target"] = network.target.parameters.flat
        return tensors


def share_within(limit: Tensor, norms: Tensor) -> Tensor:
    """The clipping factors [P] that limit gradient norms [P] to `limit` [P]; NaN for a norm that is not finite.

    A factor of 0, which is limit / inf, would pass for a gradient of 0.
    """
    return torch.add(limit / torch.maximum(norms, limit), norms, alpha=0.0)
