"""Noisy layers (arXiv 1706.10295): weights with noise whose size is learned. Axes: P agents, times copies of layers."""

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
"""The beginning of the name of the parameter that scales the noise of another."""


class NoisyLayers:
    """A network whose last hidden layer, with the residual ones after it, and heads have a scale of noise beside.

    In a network that sees images these are its fully connected layers, as in the paper, unless it has several. The
    scale of each weight is a parameter like others, so that it is padded, grown and learned as they are: what grows is
    read with a scale of zero. The noise itself is applied to the weights before a call, by `perturbed`; without it this
    computes with the means.
    """

    def __init__(self, network: Network, heads: Collection[str], sigma: float) -> None:
        """`sigma` over the root of the number of inputs is the first scale of a layer's noise, factorised."""
        self.network = network
        self.heads = heads
        self.sigma = sigma

    def specs(self, architecture: Architecture) -> Specs:
        """Return the parameters of one agent of this architecture."""
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
        """Return fresh parameters of one agent."""
        return initialise(self.specs(architecture), architecture.sizes(), generator)

    def cost(self, architecture: Architecture) -> float:
        """Count the multiplications for one observation."""
        return self.network.cost(architecture)

    def recurrent_shape(self, architecture: Architecture) -> tuple[int, int]:
        """Return that of the network."""
        return self.network.recurrent_shape(architecture)

    def forward(
        self,
        layout: Layout,
        p: Tensors,
        x: Observation,
        recurrent: RecurrentInput | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensors, Tensor | None]:
        """Return the heads' outputs [P, B, ...], by the weights as they stand in `p`."""
        return self.network.forward(layout, p, x, recurrent, tape)

    def forward_pair(
        self, layout: Layout, p: Tensors, x: Observation, following: Observation, tape: Tape | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return the outputs for `x`, and without gradients those for `following`."""
        return self.network.forward_pair(layout, p, x, following, tape)

    def without_layer(self, architecture: Architecture, index: int, tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
        """Return one agent's `tensors` without hidden layer `index`.

        Where the next layer is noisy, the product of both varies as much as it did by that noise: the variances are
        the product of the squared weights and the squared scales.
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
    """Draws the noise of a stack's weights, factorised and each agent's own (arXiv 1706.10295, eq. 10 and 11).

    With f(x) = sgn(x) sqrt |x|, the noise of a weight is f(x_in) f(x_out), that of a bias f(x_out).
    """

    def __init__(self, matrices: Mapping[str, Shape], agents: int) -> None:
        """`matrices` are the copies, and what is read and produced, of each of a network's parameters."""
        self.agents = agents
        self.matrices = {name: matrices[name] for name in matrices if SIGMA + name in matrices}
        self._shapes: dict[str, Shape] = {}
        for name, (copies, read, produced) in self.matrices.items():
            self._shapes[_layer(name) or name] = agents * copies, 1, produced
            if ".weight" in name:
                self._shapes[name] = agents * copies, read, 1
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]

    def draw(self, generator: torch.Generator) -> Tensors:
        """Return new noise [P, read, produced] by the name of the weight, [P, 1, produced] by that of a bias."""
        x = torch.randn(sum(self._sizes), generator=generator, device=generator.device)
        parts = (x.sign() * x.abs().sqrt()).split(self._sizes)
        values = {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        found: Tensors = {}
        for name in self.matrices:
            outputs = values[_layer(name) or name]
            found[name] = values[name] * outputs if name in values else outputs
        return found


def perturbed(p: Tensors, scales: Tensors, noise: Tensors) -> Tensors:
    """Return parameters `p` with `noise` on its weights, scaled by what is in `scales`."""
    return p | {name: torch.addcmul(p[name], scales[SIGMA + name], value) for name, value in noise.items()}


def _layer(name: str) -> str | None:
    """Return the layer of a weight or of a bias by the parameter's name; None for other parameters."""
    layer, weight, _ = name.partition(".weight")
    if weight:
        return layer
    return name.removesuffix(".bias") if name.endswith(".bias") else None
