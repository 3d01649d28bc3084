"""The protocol of networks, and the architecture that a configuration asks for. Axes: P agents."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from evorl.config import Network as NetworkSettings
from evorl.envs.spec import ObservationSpecs
from evorl.networks.dense import Tape
from evorl.networks.layout import Layout
from evorl.networks.parameters import Specs
from evorl.types import Architecture, Convolution, Observation, RecurrentInput, Streams, Tensors


class Network(Protocol):
    """The description of a network; the parameters live with the agents."""

    def specs(self, architecture: Architecture) -> Specs:
        """Return the parameters of one agent of this architecture."""

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Return fresh parameters of one agent."""

    def cost(self, architecture: Architecture) -> float:
        """Count the multiplications for one observation. Raises UserError where the shapes do not fit."""

    def recurrent_shape(self, architecture: Architecture) -> tuple[int, int]:
        """Return how many numbers each unit of the recurrent state has, and how many units; zeros without a state."""

    def forward(
        self,
        layout: Layout,
        p: Tensors,
        x: Observation,
        recurrent: RecurrentInput | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensors, Tensor | None]:
        """Return the heads' outputs [P, B, outputs] for observations [P, B, ...], and the next recurrent state.

        A `tape` may record what gradients need. `p` are the stack's parameters, each [P * copies, read, produced].
        """

    def forward_pair(
        self, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return the outputs for observations of one shape: for `x`, and without gradients for `following`."""

    def without_layer(self, architecture: Architecture, index: int, tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
        """Return one agent's `tensors` without hidden layer `index`, which is not the last.

        Also return which of the next layer's tensors each new one replaces, by their names.
        """


def forward_apart(
    network: Network, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
) -> tuple[Tensors, Tensors]:
    """Return what `forward_pair` does, in two passes."""
    outputs, _ = network.forward(layout, p, x, None, tape)
    with torch.no_grad():
        return outputs, network.forward(layout, p, following)[0]


def initial_architecture(
    settings: NetworkSettings, parts: ObservationSpecs, streams: Streams = "shared"
) -> Architecture:
    """Return the architecture that the configuration asks for, of a network that reads these parts."""
    if settings.name == "module":
        return Architecture()
    images = any(part.kind == "image" for part in parts.values())
    layers = [Convolution(**layer.model_dump()) for layer in settings.convolutions] if images else []
    return Architecture(
        hidden_sizes=settings.hidden_sizes,
        residual_layers=(0,) * len(settings.hidden_sizes),
        activation=settings.activation,
        layer_norm=bool(settings.layer_norm),
        streams=streams,
        convolutions=tuple(layers),
        recurrent=settings.recurrent,
        recurrent_size=settings.recurrent_size if settings.recurrent else 0,
    )
