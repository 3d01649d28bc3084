"""Network protocol and initial architecture. Axes: P agents, B batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from evorl.config import Network as NetworkSettings
from evorl.envs.spaces import ObservationSpecs
from evorl.networks.dense import Tape
from evorl.networks.layout import Layout
from evorl.networks.parameters import Specs
from evorl.types import Architecture, Convolution, Observation, RecurrentInput, Streams, Tensors


class Network(Protocol):
    """A stateless network; its parameters are stored with the agents."""

    def specs(self, architecture: Architecture) -> Specs:
        """Return the parameter specs of one agent with this architecture."""

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Return newly initialised parameters of one agent."""

    def cost(self, architecture: Architecture) -> float:
        """Return the multiplications of one forward pass per observation. Raises UserError if the shapes do not fit."""

    def recurrent_shape(self, architecture: Architecture) -> tuple[int, int]:
        """Return the numbers per recurrent unit and the number of units; zeros for a feed-forward network."""

    def forward(
        self,
        layout: Layout,
        p: Tensors,
        x: Observation,
        recurrent: RecurrentInput | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensors, Tensor | None]:
        """Return the heads' outputs [P, B, outputs] for observations [P, B, ...], and the next recurrent state.

        `p` are the stack's parameters, each [P * copies, read, produced]. A `tape` may record the call for the backward
        pass.
        """

    def forward_pair(
        self, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return the outputs for `x`, and without gradients for `following`, which has the same shape."""

    def without_layer(self, architecture: Architecture, index: int, tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
        """Return one agent's `tensors` without hidden layer `index`, which must not be the last.

        Also return a mapping from each new tensor to the tensor of the next layer that it replaces, by name.
        """


def forward_apart(
    network: Network, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
) -> tuple[Tensors, Tensors]:
    """Implement `forward_pair` by two forward passes."""
    outputs, _ = network.forward(layout, p, x, None, tape)
    with torch.no_grad():
        return outputs, network.forward(layout, p, following)[0]


def initial_architecture(
    settings: NetworkSettings, parts: ObservationSpecs, streams: Streams = "shared"
) -> Architecture:
    """Return the configured architecture of a network that reads these observation parts."""
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
