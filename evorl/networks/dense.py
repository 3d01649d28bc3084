"""Hidden layers and heads with a leading agent axis.

Axes: P agents, times branches where heads have hidden layers of their own; B batch; N units.

Padding units beyond an agent's own width have zero weights and biases. Every activation here maps 0 to 0, so padding
units output zero, get zero gradients and never change. Padding needs no mask except in layer norm statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
"""All have f(0) = 0."""


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply one linear layer per agent: [P, B, in], [P, in, out], [P, 1, out] -> [P, B, out]."""
    return torch.baddbmm(bias, x, weight)


def repeated(x: Tensor, branches: int) -> Tensor:
    """Repeat each agent's values `branches` times: [P, ...] -> [P * branches, ...]."""
    return x if branches == 1 else x.unsqueeze(1).expand(-1, branches, *x.shape[1:]).flatten(0, 1)


EPSILON = 1e-5
"""The constant that layer norm adds to a variance."""


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, share: Tensor | None) -> Tensor:
    """Apply layer norm (arXiv 1607.06450) to [P, B, N], with `share` [P, N, 1] as the units' weights in the statistics.

    Statistics over part of the units suffice (arXiv 1910.07467). So a layer can grow without changing its output:
    padding and units added to a trained layer are never included. Without `share`, all units have equal weight.
    """
    if share is None:
        normal = functional.layer_norm(x, x.shape[-1:], eps=EPSILON)
    else:
        centred = x - torch.bmm(x, share)
        normal = centred * torch.bmm(centred.square(), share).add(EPSILON).rsqrt()
    return torch.addcmul(shift, normal, gain)


def shares(active_units: Tensor) -> Tensor:
    """The weight [P, N, 1] of each unit in a mean over the units whose `active_units` [P, 1, N] is 1."""
    return (active_units / active_units.sum(-1, keepdim=True).clamp(min=1)).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class DenseLayer:
    """A hidden layer, with one weight per source, distinguished by name suffix.

    It is repeated in each of its `branches`, as the hidden layers of a dueling network are (arXiv 1511.06581).

    A `residual` layer is added to its only source, scaled by a learned parameter.
    """

    name: str
    suffixes: tuple[str, ...] = ("",)
    branches: int = 1
    residual: bool = False

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The tensors that a layer may read: per unit, then a weight for each source."""
        units = ("bias", "gain", "shift", "active_units", "scale")
        return (
            *(f"{self.name}.{part}" for part in units),
            *(f"{self.name}.weight{suffix}" for suffix in self.suffixes),
        )


@dataclass(frozen=True)
class DensePlan:
    """A sequence of hidden layers, followed by heads, if any.

    If the last layer has several `branches`, each head reads its own. With `bf16`, hidden layers multiply in
    bfloat16 (arXiv 1905.12322) and pass bfloat16 on unless they are normalised. Norms, residual sums and heads stay in
    float32, because bfloat16 keeps only three digits of values of some hundreds. With `features`, the input of the
    first head follows as one more output.
    """

    layers: tuple[DenseLayer, ...]
    heads: tuple[str, ...]
    branches: int
    activation: str
    layer_norm: bool
    bf16: bool = False
    features: bool = False

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The tensors that a plan may read, in order."""
        hidden = [name for layer in self.layers for name in layer.parameters]
        return (*hidden, *(f"{head}.{part}" for head in self.heads for part in ("weight", "bias")))

    def to_bfloat16(self, x: Tensor) -> Tensor:
        """Round `x` to the precision in which hidden layers multiply."""
        return x.bfloat16() if self.bf16 else x

    def to_float32(self, x: Tensor) -> Tensor:
        """Convert `x` to float32, for everything but the products of hidden layers."""
        return x.float() if self.bf16 else x


def dense(plan: DensePlan, p: Mapping[str, Tensor], sources: Sequence[Tensor]) -> Sequence[Tensor]:
    """Map sources [P, B, ...] to the outputs [P, B, outputs] of each head; without heads, to those of the last layer.

    With `plan.features`, the features [P, B, N] of the first head come last.
    """
    branches = plan.layers[0].branches if plan.layers else plan.branches
    sources = [repeated(source, branches) for source in sources] if plan.layers else sources
    for layer in plan.layers:
        if layer.branches != branches:
            sources, branches = [repeated(sources[0], layer.branches // branches)], layer.branches
        sources = [_hidden(plan, layer, p, sources)]
    x = plan.to_float32(sources[0])
    if not plan.heads:
        return [x]
    inputs = [x] * len(plan.heads) if plan.branches == 1 else x.reshape(-1, plan.branches, *x.shape[1:]).unbind(1)
    outputs = [linear(x, p[f"{head}.weight"], p[f"{head}.bias"]) for head, x in zip(plan.heads, inputs, strict=True)]
    return [*outputs, inputs[0]] if plan.features else outputs


def _hidden(plan: DensePlan, layer: DenseLayer, p: Mapping[str, Tensor], sources: Sequence[Tensor]) -> Tensor:
    """The output [P * branches, B, N] of one hidden layer."""
    x = plan.to_bfloat16(p[f"{layer.name}.bias"])
    for source, suffix in zip(sources, layer.suffixes, strict=True):
        x = torch.baddbmm(x, plan.to_bfloat16(source), plan.to_bfloat16(p[f"{layer.name}.weight{suffix}"]))
    if plan.layer_norm:
        gain, shift = p[f"{layer.name}.gain"], p[f"{layer.name}.shift"]
        x = layer_norm(plan.to_float32(x), gain, shift, p.get(f"{layer.name}.active_units"))
    x = ACTIVATIONS[plan.activation](x)
    if not layer.residual:
        return x
    return torch.addcmul(plan.to_float32(sources[0]), p[f"{layer.name}.scale"], plan.to_float32(x))
