"""Agents during a generation: stacked, so that they act and learn as one. Axes: P agents, E environments, B batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.networks import first_architecture
from evorl.networks.layout import Layout, plan_stacks
from evorl.networks.stacked import Stack, StackedModule, new_tensors
from evorl.randomness import torch_generator
from evorl.timing import Stopwatch
from evorl.types import Agent, Batch, Decision


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
        copies: int = 1,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.agents: list[Agent] = []
        self.stacks: list[Stack] = []
        self._generator = generator
        self._average = average
        self._copies = copies
        self._stopwatch = stopwatch or Stopwatch()
        for members, layout in plan_stacks([agent.architecture for agent in agents], *algorithm.widths):
            start = len(self.agents)
            self.agents += [agents[index] for index in members]
            self.stacks.append(self._stack(self.agents[start:], start, layout))
        device = generator.device
        self._gradients = {
            name: torch.zeros(sum(stack.modules[name].parameters.flat.numel() for stack in self.stacks), device=device)
            for name in algorithm.networks
        }
        self._loss = torch.zeros(len(self.agents), device=device)
        self._updates = torch.zeros(len(self.agents), device=device)

    @torch.no_grad()
    def act(self, observation: Tensor) -> Decision:
        """Decisions that explore, for observations [P, E, ...]."""
        algorithm, steps = self.algorithm, observation.shape[1] * self._copies
        parts = [algorithm.act(stack, observation[stack.members], self._generator) for stack in self.stacks]
        for stack in self.stacks:
            algorithm.after_acting(stack, steps)
        return _joined(parts)

    @torch.no_grad()
    def best(self, observation: Tensor) -> Decision:
        """The best decisions known, for observations [P, E, ...]."""
        return _joined([self.algorithm.best(stack, observation[stack.members]) for stack in self.stacks])

    def learn(self, batch: Batch) -> None:
        """Update all agents that are due, each from its own part of the batch."""
        with self._stopwatch("learning"):
            # Slicing costs 12 us, 1 % of an update of small networks; one stack needs none.
            parts = [batch.part(stack.members) for stack in self.stacks] if len(self.stacks) > 1 else [batch]
            for name, loss in self.algorithm.losses.items():
                self._descend(name, [loss(stack, part) for stack, part in zip(self.stacks, parts, strict=True)], parts)
            for stack, part in zip(self.stacks, parts, strict=True):
                self.algorithm.after_update(stack, part.due)
            self._updates += batch.due

    def _descend(self, name: str, losses: list[Tensor], parts: list[Batch]) -> None:
        """One gradient step of the network `name` in every stack, given the losses [P] of each."""
        modules = [stack.modules[name] for stack in self.stacks]
        gradients = self._gradients[name].split([module.parameters.flat.numel() for module in modules])
        for module, loss, gradient in zip(modules, losses, gradients, strict=True):
            module.gradient(loss, out=gradient)
        with self._stopwatch("communication"):
            self._average(self._gradients[name])
        for stack, part, gradient in zip(self.stacks, parts, gradients, strict=True):
            module, numbers = stack.modules[name], stack.hyperparameters
            rate, limit = numbers["learning_rate"], numbers.get("max_grad_norm")
            module.adam.step(module.parameters.flat, gradient, rate, part.due, limit)
        for stack, part, loss in zip(self.stacks, parts, losses, strict=True):
            self._loss[stack.members].addcmul_(loss.detach(), part.due)

    def losses(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sums of losses and counts of updates [P] in this generation."""
        return self._loss.cpu().numpy().astype(np.float64), self._updates.cpu().numpy().astype(np.float64)

    def to_agents(self) -> list[Agent]:
        """The agents with all that they have learned."""
        for stack in self.stacks:
            for index, agent in enumerate(self.agents[stack.members]):
                for module in stack.modules.values():
                    module.unload(index, agent)
                agent.state |= {name: float(values[index]) for name, values in stack.state.items()}
        return self.agents

    def _stack(self, agents: list[Agent], start: int, layout: Layout) -> Stack:
        device = self._generator.device
        modules = {
            name: StackedModule(name, network, layout, len(agents), device)
            for name, network in self.algorithm.networks.items()
        }
        for module in modules.values():
            module.load(agents)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return Stack(
            members=slice(start, start + len(agents)),
            modules=modules,
            hyperparameters={
                name: column([agent.hyperparameters[name] for agent in agents]) for name in agents[0].hyperparameters
            },
            state={name: column([agent.state[name] for agent in agents]) for name in self.algorithm.first_state()},
        )


def found_population(config: AnyConfig, algorithm: Algorithm) -> list[Agent]:
    """The first generation: agents that differ only in their random weights."""
    agents = []
    for id in range(config.population.size):
        generator = torch_generator(config.seed, generation=0, rank=id, purpose="first parameters")
        agent = Agent(
            id=id,
            architecture=first_architecture(config.network),
            hyperparameters=algorithm.first_hyperparameters(),
            tensors={},
            state=algorithm.first_state(),
        )
        new_tensors(algorithm.networks, agent, generator)
        agents.append(agent)
    return agents


def _joined(parts: Sequence[Decision]) -> Decision:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
