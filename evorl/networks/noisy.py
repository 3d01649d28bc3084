"""Noisy networks (arXiv 1706.10295): weights with noise of learned scale. Axes: P agents, times copies of layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from evorl.networks.base import Network
from evorl.networks.dense import Tape
from evorl.networks.layout import Layout
from evorl.networks.parameters import ParameterSpec, Shape, Specs, initialise, moved_up
from evorl.types import Architecture, Observation, RecurrentInput, Tensors

SIGMA = "sigma."
"""Name prefix of the parameter that holds another parameter's noise scale."""


class NoisyLayers:
    """A network with noisy heads and a noisy last hidden layer, including that layer's residual layers.

    For networks on images these are the fully connected layers, as in the paper, unless there are several. Noise scales
    are ordinary parameters: they are padded, grown and trained as the weights are, and outgoing weights of new units
    start with a scale of zero. `perturbed` applies the noise to the weights before a call; without it the network
    computes with the mean weights.
    """

    def __init__(self, network: Network, heads: Collection[str], sigma: float) -> None:
        """Wrap `network`; noise is factorised, and its initial scale is `sigma` / sqrt(number of inputs)."""
        self.network = network
        self.heads = heads
        self.sigma = sigma

    def specs(self, architecture: Architecture) -> Specs:
        """Return the parameter specs of one agent with this architecture."""
        specs, sizes = self.network.specs(architecture), architecture.sizes()
        layers: dict[str, Specs] = defaultdict(dict)
        for name, spec in specs.items():
            layer = _layer(name)
            last = f"hidden.{len(architecture.hidden_sizes) - 1}"
            if layer is not None and (layer in self.heads or layer == last or layer.startswith(f"{last}.")):
                layers[layer][name] = spec
        scales: Specs = {}
        for own in layers.values():
            inputs = sum(spec.matrix(sizes)[1] for name, spec in own.items() if ".weight" in name)
            gain = self.sigma / math.sqrt(inputs)
            for name, spec in own.items():
                scales[SIGMA + name] = ParameterSpec(spec.reads, spec.produces, "ones", copies=spec.copies, gain=gain)
        return specs | scales

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Return newly initialised parameters of one agent."""
        return initialise(self.specs(architecture), architecture.sizes(), generator)

    def cost(self, architecture: Architecture) -> float:
        """Return the multiplications of one forward pass per observation."""
        return self.network.cost(architecture)

    def recurrent_shape(self, architecture: Architecture) -> tuple[int, int]:
        """Return the recurrent shape of the wrapped network."""
        return self.network.recurrent_shape(architecture)

    def forward(
        self,
        layout: Layout,
        p: Tensors,
        x: Observation,
        recurrent: RecurrentInput | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensors, Tensor | None]:
        """Return the heads' outputs [P, B, ...] computed with the weights in `p`."""
        return self.network.forward(layout, p, x, recurrent, tape)

    def forward_pair(
        self, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return the outputs for `x`, and without gradients for `following`."""
        return self.network.forward_pair(layout, p, x, following, tape)

    def without_layer(self, architecture: Architecture, index: int, tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
        """Return one agent's `tensors` without hidden layer `index`.

        If the next layer is noisy, the product of the two weights keeps the variance due to that noise: the variances
        are the product of the squared weights and the squared scales.
        """
        means = {name: value for name, value in tensors.items() if not name.startswith(SIGMA)}
        scales = {name.removeprefix(SIGMA): value for name, value in tensors.items() if name.startswith(SIGMA)}
        left, replaced = self.network.without_layer(architecture, index, means)
        gone = set(replaced.values())
        left |= {SIGMA + moved_up(name, index): value for name, value in scales.items() if name not in gone}
        if gone & scales.keys():
            squares = {name: scales.get(name, value).square() for name, value in means.items()}
            variances, _ = self.network.without_layer(architecture, index, squares)
            left |= {SIGMA + name: variances[name].sqrt() for name in replaced}
            replaced |= {SIGMA + name: SIGMA + old for name, old in replaced.items()}
        return left, replaced


class WeightNoise:
    """Samples factorised weight noise for a stack, independently per agent (arXiv 1706.10295, eq. 10 and 11).

    With f(x) = sgn(x) sqrt |x|, the noise of a weight is f(x_in) f(x_out), and that of a bias is f(x_out).
    """

    def __init__(self, matrices: Mapping[str, Shape], agents: int) -> None:
        """Prepare shapes; `matrices` holds (copies, inputs, outputs) of each parameter of a network."""
        self.agents = agents
        self.matrices = {name: matrices[name] for name in matrices if SIGMA + name in matrices}
        self._shapes: dict[str, Shape] = {}
        for name, (copies, read, produced) in self.matrices.items():
            self._shapes[_layer(name) or name] = agents * copies, 1, produced
            if ".weight" in name:
                self._shapes[name] = agents * copies, read, 1
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]

    def draw(self, generator: torch.Generator) -> Tensors:
        """Sample noise [P, read, produced] for each weight and [P, 1, produced] for each bias, by name."""
        x = torch.randn(sum(self._sizes), generator=generator, device=generator.device)
        parts = (x.sign() * x.abs().sqrt()).split(self._sizes)
        values = {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        found: Tensors = {}
        for name in self.matrices:
            outputs = values[_layer(name) or name]
            found[name] = values[name] * outputs if name in values else outputs
        return found


def perturbed(p: Tensors, scales: Tensors, noise: Tensors) -> Tensors:
    """Return parameters `p` with `noise` added to the weights, multiplied by the noise scales in `scales`."""
    return p | {name: torch.addcmul(p[name], scales[SIGMA + name], value) for name, value in noise.items()}


def _layer(name: str) -> str | None:
    """Return the layer to which a weight or bias belongs, by its name; None for other parameters."""
    layer, weight, _ = name.partition(".weight")
    if weight:
        return layer
    return name.removesuffix(".bias") if name.endswith(".bias") else None
