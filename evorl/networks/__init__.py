"""Networks with a leading agent axis, and the registry of those a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from evorl.config import Network as NetworkSettings
from evorl.networks.layers import ACTIVATIONS
from evorl.networks.layout import Layout
from evorl.networks.mlp import MLP
from evorl.networks.module import module_network
from evorl.networks.parameters import Specs
from evorl.types import Architecture, Tensors


class Network(Protocol):
    """The description of a network; the parameters live with the agents."""

    def specs(self, architecture: Architecture, stacked: bool = False) -> Specs:
        """The parameters of one agent of this architecture, or their padded room in a stack."""

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Fresh parameters of one agent."""

    def forward(self, layout: Layout, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """[P, B, inputs] -> [P, B, outputs] with the stack's parameters `p`."""

    def without_layer(self, architecture: Architecture, index: int, tensors: Tensors) -> tuple[Tensors, set[str]]:
        """`tensors` of one agent after hidden layer `index`, not the last, went out, and the names that are new."""


NETWORKS: Mapping[str, Callable[[NetworkSettings, int, int], Network]] = {
    "mlp": lambda settings, inputs, outputs: MLP(inputs, outputs),
    "module": lambda settings, inputs, outputs: module_network(settings.factory or "", inputs, outputs),
}
"""From (settings, inputs, outputs) to the network."""


def first_architecture(settings: NetworkSettings) -> Architecture:
    """The architecture that the configuration asks for."""
    if settings.name == "module":
        return Architecture()
    return Architecture(
        hidden_sizes=settings.hidden_sizes,
        residual_layers=(0,) * len(settings.hidden_sizes),
        activation=settings.activation,
        layer_norm=settings.layer_norm,
        dueling=settings.dueling,
    )


__all__ = ["ACTIVATIONS", "NETWORKS", "Layout", "Network", "first_architecture"]
