"""Agents during a generation: stacked, so that they act and learn as one. Axes: P agents, E environments, B batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig, check_name
from evorl.moments import Moments
from evorl.networks import ACTIVATIONS, CELLS
from evorl.networks.layout import Layout, plan_stacks
from evorl.networks.stacked import Stack, StackedModule, check_module, new_tensors
from evorl.randomness import torch_generator
from evorl.timing import Stopwatch
from evorl.types import Agent, Architecture, Batch, Decision, Loss, Observation, Recall, Tensors, UserError

Decide = Callable[[Stack, Observation, Recall | None], tuple[Decision, Tensor | None]]


LARGEST = 1e15
"""What nothing that an agent counts comes to."""


class Memory:
    """What recurrent agents remember of the episodes they are in: `values` [P, E, K, N]; empty for other agents."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Population:
    """The agents of this rank for one generation.

    `agents` stand in the order of the agent axis: stack by stack, and in a stack activation by activation. `average`
    replaces a flat gradient by its mean over the ranks that hold the same agents; one call serves all stacks.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        algorithm: Algorithm,
        *,
        generator: torch.Generator,
        average: Callable[[Tensor], None] = lambda flat: None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.agents: list[Agent] = []
        self.stacks: list[Stack] = []
        self._generator = generator
        self._average = average
        self._stopwatch = stopwatch or Stopwatch()
        for members, layout in plan_stacks([agent.architecture for agent in agents], self._cost):
            start = len(self.agents)
            self.agents += [agents[index] for index in members]
            self.stacks.append(self._stack(self.agents[start:], start, layout))
        device, count = generator.device, len(self.agents)
        # The last places of each buffer carry every agent's divergence, so that one collective averages both.
        self._gradients = {
            name: torch.zeros(
                sum(stack.modules[name].parameters.flat.numel() for stack in self.stacks) + count, device=device
            )
            for name in algorithm.networks
        }
        self._statistics: dict[tuple[str, ...], Tensor] = {}
        self._healthy = torch.ones(count, device=device)
        self._faults: dict[int, str] = {}
        # In double precision, as everything that counts: single stands still at 17 million.
        self._updates = torch.zeros(count, dtype=torch.float64, device=device)

    def memory(self, num_envs: int) -> Memory:
        """What agents remember before they have seen anything, for so many environments of each."""
        shapes = [module.memory for stack in self.stacks for module in stack.modules.values()]
        slots, units = (max(sizes) for sizes in zip(*shapes, strict=True))
        return Memory(torch.zeros(len(self.agents), num_envs, slots, units, device=self._generator.device))

    @torch.no_grad()
    def act(self, observation: Observation, memory: Memory) -> Decision:
        """Decisions that explore, for observations [P, E, ...]; `memory` moves on.

        Where agents remember something, the decision says what, as `memory` before and `next_memory` after it.
        """
        algorithm = self.algorithm

        def act(stack: Stack, seen: Observation, recall: Recall | None) -> tuple[Decision, Tensor | None]:
            return algorithm.act(stack, seen, recall, self._generator)

        before = memory.values
        decision = self._decide(act, observation, memory)
        return {**decision, "memory": before, "next_memory": memory.values} if before.numel() else decision

    def acted(self, steps: NDArray[np.float64]) -> None:
        """Note `steps` [P] further transitions of each agent, over all ranks that hold it; all of them say the same."""
        # Where all agents made equally many, a plain number spares a copy to the device.
        same, device = bool((steps == steps[0]).all()), self._generator.device
        for stack in self.stacks:
            own = steps[stack.members]
            self.algorithm.after_acting(stack, float(own[0]) if same else torch.from_numpy(own).to(device))

    @torch.no_grad()
    def best(self, observation: Observation, memory: Memory) -> Decision:
        """The best decisions known, for observations [P, E, ...]; `memory` moves on."""
        return self._decide(self.algorithm.best, observation, memory)

    @torch.no_grad()
    def value(self, observation: Observation, memory: Tensor | None) -> Tensor:
        """What the agents expect [P, E] from observations [P, E, ...], remembering `memory` [P, E, K, N]."""
        shape = next(iter(observation.values())).shape[:2]
        started = torch.zeros(shape, dtype=torch.bool, device=self._generator.device)
        parts = [
            self.algorithm.value(stack, self._part(observation, stack), _recall(stack, memory, started))
            for stack in self.stacks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def absorb(self, part: str, moments: Moments) -> None:
        """Add to the statistics by which each agent normalises a part of what it sees."""
        for stack in self.stacks:
            for module in stack.modules.values():
                room = [module.buffers.views[f"normal.{part}.{name}"] for name in Moments._fields]
                count, mean, variance = (view.flatten(1).double().cpu().numpy() for view in room)
                merged = Moments(count[:, 0], mean, variance).merged(moments.part(stack.members))
                for view, values in zip(room, merged, strict=True):
                    view.copy_(torch.from_numpy(values).reshape(view.shape))

    def learn(self, batch: Batch) -> None:
        """Update all agents that are due, each from its own part of the batch."""
        with self._stopwatch("learning"):
            # Slicing costs 12 us, 1 % of an update of small networks; one stack needs none.
            parts = [batch]
            if len(self.stacks) > 1:
                parts = [batch.part(stack.members, stack.memory_units) for stack in self.stacks]
            if self._faults:
                batch.due.mul_(self._healthy)
            for name, loss in self.algorithm.losses.items():
                self._descend(name, [loss(stack, part) for stack, part in zip(self.stacks, parts, strict=True)], parts)
            for stack, part in zip(self.stacks, parts, strict=True):
                self.algorithm.after_update(stack, part.due)
            self._updates += batch.due

    def _descend(self, name: str, losses: list[Loss], parts: list[Batch]) -> None:
        """One gradient step of the network `name` in every stack, given the losses of each."""
        modules = [stack.modules[name] for stack in self.stacks]
        flat, count = self._gradients[name], len(self.agents)
        gradients = flat[:-count].split([module.parameters.flat.numel() for module in modules])
        divergence = flat[-count:]
        for stack, module, loss, gradient in zip(self.stacks, modules, losses, gradients, strict=True):
            module.gradient(loss.value, out=gradient)
            # A loss that is not a finite number makes its place NaN, on all ranks after the average.
            torch.mul(loss.value.detach(), 0.0, out=divergence[stack.members])
            if loss.divergence is not None:
                divergence[stack.members] += loss.divergence
        with self._stopwatch("communication"):
            self._average(flat)
        # One number read back for all agents: 4 us where every agent's norm takes 52 (4 agents, 5,000 values each).
        if not math.isfinite(flat.sum()):
            for stack, part, gradient in zip(self.stacks, parts, gradients, strict=True):
                self._quarantine(stack, name, part.due, gradient, divergence[stack.members])
        for stack, part, loss, gradient in zip(self.stacks, parts, losses, gradients, strict=True):
            if loss.limit is not None:
                part.due.mul_(divergence[stack.members] <= loss.limit)
            module, rate = stack.modules[name], self.algorithm.learning_rate(stack)
            limit = stack.hyperparameters.get("max_grad_norm")
            module.adam.step(module.parameters.flat, gradient, rate, part.due, limit)
            self._note(stack, part.due, {"loss": loss.value, **loss.statistics})

    @torch.no_grad()
    def _quarantine(self, stack: Stack, name: str, due: Tensor, gradient: Tensor, mark: Tensor) -> None:
        """Keep agents whose gradient or `mark` [P] is not finite from this update and from all that follow."""
        adam = stack.modules[name].adam
        bad = ~(adam.norms(gradient).isfinite() & mark.isfinite())
        for place in (bad & (due > 0)).nonzero().flatten().tolist():
            member = stack.members.start + place
            self._faults[member] = f"loss or gradient not finite at update {int(self._updates[member]) + 1}"
            self._healthy[member] = 0.0
        due.mul_(~bad)
        # A gradient that is not a number would spoil even moments that it has no weight in.
        for row in adam.rows(gradient):
            row.masked_fill_(bad.unsqueeze(-1), 0.0)

    @torch.no_grad()
    def _note(self, stack: Stack, due: Tensor, statistics: Tensors) -> None:
        names = tuple(statistics)
        if names not in self._statistics:
            self._statistics[names] = self._updates.new_zeros(len(names), len(self.agents))
        values = torch.stack(list(statistics.values()))
        if self._faults:
            values = values.where(due > 0, 0.0)
        self._statistics[names][:, stack.members].addcmul_(values, due)

    def statistics(self) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
        """Sums of what losses say, over the updates of each agent in this generation, and counts of those [P]."""
        # All of them from the start: every rank must give equally many, also one that has not learned yet.
        sums = {name: np.zeros(len(self.agents)) for name in self.algorithm.statistics}
        for names, values in self._statistics.items():
            for name, value in zip(names, values.cpu().numpy().astype(np.float64), strict=True):
                sums[name] += value
        return sums, self._updates.cpu().numpy().astype(np.float64)

    def to_agents(self) -> list[Agent]:
        """The agents with all that they have learned."""
        for stack in self.stacks:
            for index, agent in enumerate(self.agents[stack.members]):
                for module in stack.modules.values():
                    module.unload(index, agent)
                agent.state |= {name: float(values[index]) for name, values in stack.state.items()}
        for member, agent in enumerate(self.agents):
            agent.fault = self._faults.get(member) or _not_finite(agent)
        return self.agents

    def _decide(self, decide: Decide, observation: Observation, memory: Memory) -> Decision:
        decisions: list[Decision] = []
        after = torch.zeros_like(memory.values)
        for stack in self.stacks:
            seen = self._part(observation, stack)
            recall = _recall(stack, memory.values, observation["started"])
            decision, remembered = decide(stack, seen, recall)
            decisions.append(decision)
            if remembered is not None:
                after[stack.members, :, :, : remembered.shape[-1]] = remembered
        memory.values = after
        return _joined(decisions)

    def _part(self, observation: Observation, stack: Stack) -> Observation:
        """What the agents of one stack see."""
        if len(self.stacks) == 1:
            return observation
        return {name: value[stack.members] for name, value in observation.items()}

    def _cost(self, architecture: Architecture) -> float:
        return sum(network.cost(architecture) for network in self.algorithm.networks.values())

    def _stack(self, agents: list[Agent], start: int, layout: Layout) -> Stack:
        device, epsilon = self._generator.device, self.algorithm.settings.adam_epsilon
        modules = {
            name: StackedModule(name, network, layout, len(agents), epsilon, device)
            for name, network in self.algorithm.networks.items()
        }
        for module in modules.values():
            module.load(agents)

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Stack(
            members=slice(start, start + len(agents)),
            modules=modules,
            hyperparameters={
                name: column([agent.hyperparameters[name] for agent in agents], torch.float32)
                for name in agents[0].hyperparameters
            },
            state={
                name: column([agent.state[name] for agent in agents], torch.float64)
                for name in self.algorithm.first_state()
            },
        )


def _not_finite(agent: Agent) -> str | None:
    """What of an agent is not a finite number, if anything is."""
    for module, roles in agent.tensors.items():
        for role, named in roles.items():
            for name, value in named.items():
                if not value.isfinite().all():
                    return f"{role} of {module}.{name} not finite"
    wrong = [name for name, value in agent.state.items() if not math.isfinite(value)]
    return f"{wrong[0]} not finite" if wrong else None


def check_agents(agents: Sequence[Agent], algorithm: Algorithm, where: str) -> None:
    """Raise UserError unless the agents could be this algorithm's; nothing has been built from them before this."""
    numbers, state = algorithm.settings.first_hyperparameters(), algorithm.first_state()
    if len({agent.id for agent in agents}) < len(agents):
        raise UserError(f"{where}: two agents have the same id")
    for agent in agents:
        here, shape = f"{where}: agent {agent.id}", agent.architecture
        if shape.activation is not None:
            check_name(f"{here}: activation", shape.activation, ACTIVATIONS)
        if shape.recurrent is not None:
            check_name(f"{here}: recurrent", shape.recurrent, CELLS)
        if agent.hyperparameters.keys() != numbers.keys():
            raise UserError(f"{here}: has the hyperparameters {sorted(agent.hyperparameters)}, not {sorted(numbers)}")
        if agent.tensors.keys() != algorithm.networks.keys():
            raise UserError(f"{here}: has the networks {sorted(agent.tensors)}, not {sorted(algorithm.networks)}")
        counted = state.keys() | {f"{module}.updates" for module in agent.tensors}
        if missing := counted - agent.state.keys():
            raise UserError(f"{here}: its state lacks {sorted(missing)}")
        for module, network in algorithm.networks.items():
            check_module(agent, module, network, here)
        for name, value in agent.hyperparameters.items():
            if reason := algorithm.settings.refusal(name, value):
                raise UserError(f"{here}: {reason}")
        if not all(abs(agent.state[name]) <= LARGEST for name in counted):
            raise UserError(f"{here}: its state counts beyond {LARGEST:g}")
        if fault := _not_finite(agent):
            raise UserError(f"{here}: {fault}")


def found_population(config: AnyConfig, algorithm: Algorithm) -> list[Agent]:
    """The first generation: agents that differ only in their random weights."""
    agents = []
    for id in range(config.population.size):
        generator = torch_generator(config.seed, generation=0, rank=id, purpose="first parameters")
        agent = Agent(
            id=id,
            architecture=algorithm.first_architecture(),
            hyperparameters=algorithm.settings.first_hyperparameters(),
            tensors={},
            state=algorithm.first_state(),
        )
        new_tensors(algorithm.networks, agent, generator)
        agents.append(agent)
    return agents


def _recall(stack: Stack, memory: Tensor | None, started: Tensor) -> Recall | None:
    """What a stack remembers, from the memory [P, E, K, N] and the starts [P, E] of all agents' environments."""
    if memory is None or stack.memory_units == 0:
        return None
    return Recall(memory, started.unsqueeze(1)).part(stack.members, stack.memory_units)


def _joined(parts: Sequence[Decision]) -> Decision:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
