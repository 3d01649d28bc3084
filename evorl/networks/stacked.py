"""Agents that train as one. Axes: P agents of the stack, B batch, D all values of a flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evorl.formats import check_tensors
from evorl.networks import Network
from evorl.networks.growth import fresh_roles
from evorl.networks.layers import shares
from evorl.networks.layout import Layout
from evorl.networks.optimizer import StackedAdam
from evorl.networks.parameters import FlatTensors, Shape
from evorl.types import ROLES, Agent, Observation, Recall, Tensors, UserError


class StackedModule:
    """One network of every agent in a stack, with its target copy and its optimiser.

    In an agent, the module's tensors and the number of its updates stand under the module's name. `epsilon` is the
    optimiser's and the same for all agents.
    """

    def __init__(
        self, name: str, network: Network, layout: Layout, agents: int, epsilon: float, device: torch.device
    ) -> None:
        self.name = name
        self.network = network
        self.layout = layout
        sizes = layout.architecture.sizes()
        specs = network.specs(layout.architecture, stacked=True)
        shapes = {key: spec.shape(sizes) for key, spec in specs.items()}
        trained = {key: shapes[key] for key, spec in specs.items() if spec.trained}
        untrained = {key: shapes[key] for key, spec in specs.items() if not spec.trained}
        matrices = {key: spec.matrix(sizes) for key, spec in specs.items()}
        self._masks = [key for key, spec in specs.items() if spec.mask]
        self.parameters = FlatTensors(trained, agents, device)
        self.target_parameters = FlatTensors(trained, agents, device)
        self.buffers = FlatTensors(untrained, agents, device)
        self.adam = StackedAdam(trained, agents, epsilon, device)
        self.leaves = {key: view.requires_grad_() for key, view in self.parameters.matrices(matrices).items()}
        buffers = self.buffers.matrices(matrices)
        self._online = self.leaves | buffers
        self._target = self.target_parameters.matrices(matrices) | buffers
        self._rate = torch.empty_like(self.parameters.flat)
        self._rate_rows = self.parameters.rows(self._rate)
        self.memory = network.memory(layout.architecture)

    def __call__(self, x: Observation, recall: Recall | None = None) -> Tensors:
        """The heads' outputs [P, B, outputs] for observations [P, B, ...]."""
        return self.network.forward(self.layout, self._online, x, recall)[0]

    def remember(self, x: Observation, recall: Recall | None) -> tuple[Tensors, Tensor | None]:
        """The same, and the memory [P, S, K, N] after the observations."""
        return self.network.forward(self.layout, self._online, x, recall)

    def target(self, x: Observation) -> Tensors:
        """The same through the target copy."""
        return self.network.forward(self.layout, self._target, x)[0]

    def gradient(self, loss: Tensor, out: Tensor) -> None:
        """Write the flat gradient [D] of the loss [P], summed over agents, into `out`."""
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True, materialize_grads=True)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=out)

    @torch.no_grad()
    def follow(self, rate: Tensor) -> None:
        """Move the target copy towards the parameters by each agent's `rate` [P]."""
        for row in self._rate_rows:
            row.copy_(rate.unsqueeze(-1))
        self.target_parameters.flat.lerp_(self.parameters.flat, self._rate)

    def load(self, agents: Sequence[Agent]) -> None:
        """Take over the tensors of the stack's agents."""
        for role, flat in self._roles().items():
            flat.load([agent.tensors[self.name][role] for agent in agents])
        for key in self._masks:
            if bool((self.buffers.views[key] == 1).all()):
                del self._online[key], self._target[key]
            else:
                self._online[key] = self._target[key] = shares(self._online[key])
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

    @property
    def memory_units(self) -> int:
        """The units of the agents' memory; 0 without one."""
        return max(module.memory[1] for module in self.modules.values())


def new_tensors(networks: Mapping[str, Network], agent: Agent, generator: torch.Generator) -> None:
    """Give `agent` fresh parameters, targets equal to them and zero moments, for each of its networks."""
    for module, network in networks.items():
        values = network.initialise(agent.architecture, generator)
        agent.tensors[module] = fresh_roles(network.specs(agent.architecture), values)
        agent.state[f"{module}.updates"] = 0.0


def check_module(agent: Agent, module: str, network: Network, where: str) -> None:
    """Raise UserError unless the tensors of one network of `agent` are those of its architecture."""
    shape, roles = agent.architecture, agent.tensors[module]
    if len(shape.residual_layers) != len(shape.hidden_sizes):
        raise UserError(f"{where}: {len(shape.hidden_sizes)} hidden layers with {len(shape.residual_layers)} depths")
    layers = shape.layers + len(shape.convolutions) + sum(layer.residual_layers for layer in shape.convolutions)
    # Every layer has tensors, so that a description cannot ask for more of them than its file holds.
    if layers > len(roles["parameters"]):
        raise UserError(f"{where}: {layers} layers cannot stand in {len(roles['parameters'])} tensors")
    try:
        sizes, specs = shape.sizes(), network.specs(shape)
        shapes = {name: (spec.shape(sizes), torch.float32) for name, spec in specs.items()}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{where}: its architecture does not fit together: {error}") from error
    for role in ROLES:
        trained = role != "buffers"
        expected = {name: shapes[name] for name, spec in specs.items() if spec.trained == trained}
        check_tensors(roles[role], expected, f"{where}: {role} of {module}")
