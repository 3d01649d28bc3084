"""Agents that train as one. Axes: P agents of the stack, B batch, D all values of a flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evorl.networks import Network
from evorl.networks.growth import fresh_roles
from evorl.networks.layout import Layout
from evorl.networks.optimizer import StackedAdam
from evorl.networks.parameters import FlatTensors, Shape
from evorl.types import Agent


class StackedModule:
    """One network of every agent in a stack, with its target copy and its optimiser.

    In an agent, the module's tensors and the number of its updates stand under the module's name.
    """

    def __init__(self, name: str, network: Network, layout: Layout, agents: int, device: torch.device) -> None:
        self.name = name
        self.network = network
        self.layout = layout
        sizes = layout.architecture.sizes()
        specs = network.specs(layout.architecture, stacked=True)
        trained = {key: spec.shape(sizes) for key, spec in specs.items() if spec.trained}
        untrained = {key: spec.shape(sizes) for key, spec in specs.items() if not spec.trained}
        self.parameters = FlatTensors(trained, agents, device)
        self.target_parameters = FlatTensors(trained, agents, device)
        self.buffers = FlatTensors(untrained, agents, device)
        self.adam = StackedAdam(trained, agents, device)
        self.leaves = self.parameters.trainable()
        self._online = self.leaves | self.buffers.views
        self._target = self.target_parameters.views | self.buffers.views
        self._agent = self.parameters.agent_index()
        self._rate = torch.empty_like(self.parameters.flat)

    def __call__(self, x: Tensor) -> Tensor:
        """[P, B, inputs] -> [P, B, outputs]."""
        return self.network.forward(self.layout, self._online, x.to(self._rate.dtype))

    def target(self, x: Tensor) -> Tensor:
        """The same through the target copy."""
        return self.network.forward(self.layout, self._target, x.to(self._rate.dtype))

    def gradient(self, loss: Tensor, out: Tensor) -> None:
        """Write the flat gradient [D] of the loss [P], summed over agents, into `out`."""
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True, materialize_grads=True)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=out)

    @torch.no_grad()
    def follow(self, rate: Tensor) -> None:
        """Move the target copy towards the parameters by each agent's `rate` [P]."""
        torch.index_select(rate, 0, self._agent, out=self._rate)
        self.target_parameters.flat.lerp_(self.parameters.flat, self._rate)

    def load(self, agents: Sequence[Agent]) -> None:
        """Take over the tensors of the stack's agents."""
        for role, flat in self._roles().items():
            flat.load([agent.tensors[self.name][role] for agent in agents])
        updates = [agent.state[f"{self.name}.updates"] for agent in agents]
        self.adam.updates.copy_(torch.tensor(updates, dtype=torch.float64))

    def unload(self, index: int, agent: Agent) -> None:
        """Write what member `index` of the stack has learned into `agent`."""
        sizes = agent.architecture.sizes()
        specs = self.network.specs(agent.architecture)
        for role, flat in self._roles().items():
            shapes: dict[str, Shape] = {key: spec.shape(sizes) for key, spec in specs.items() if key in flat.views}
            agent.tensors[self.name][role] = flat.unload(index, shapes)
        agent.state[f"{self.name}.updates"] = float(self.adam.updates[index])

    def _roles(self) -> dict[str, FlatTensors]:
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "target": self.target_parameters,
            "mean": self.adam.mean,
            "square": self.adam.square,
        }


@dataclass
class Stack:
    """Compatible agents: `members` of the population's agent axis, and their numbers as [P] tensors."""

    members: slice
    modules: dict[str, StackedModule]
    hyperparameters: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)


def new_tensors(networks: Mapping[str, Network], agent: Agent, generator: torch.Generator) -> None:
    """Give `agent` fresh parameters, targets equal to them and zero moments, for each of its networks."""
    for module, network in networks.items():
        values = network.initialise(agent.architecture, generator)
        agent.tensors[module] = fresh_roles(network.specs(agent.architecture), values)
        agent.state[f"{module}.updates"] = 0.0
