"""Layers with a leading agent axis. Axes: P agents, B batch, N units.

Padding units beyond an agent's own width have zero weights and biases. Every activation here maps 0 to 0, so padding
units output zero, get zero gradients and never change. Padding needs no mask except in layer norm statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Activation:
    """An activation with f(0) = 0, and its gradient from (gradient of y, x, y).

    `in_place` overwrites x by y. It exists where the gradient needs only y, and saves 11 to 16 % of a forward pass.
    """

    function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    in_place: Callable[[Tensor], Tensor] | None = None


aten = torch.ops.aten
ACTIVATIONS: Mapping[str, Activation] = {
    "relu": Activation(torch.relu, lambda g, x, y: aten.threshold_backward(g, y, 0), torch.relu_),
    "tanh": Activation(torch.tanh, lambda g, x, y: aten.tanh_backward(g, y), torch.tanh_),
    "elu": Activation(functional.elu, lambda g, x, y: aten.elu_backward(g, 1, 1, 1, False, x)),
    "gelu": Activation(functional.gelu, lambda g, x, y: aten.gelu_backward(g, x)),
    "silu": Activation(functional.silu, lambda g, x, y: aten.silu_backward(g, x)),
}

Span = tuple[str, int, int]
"""Name of an activation, and the range [start, stop) of agents that use it."""


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply one linear layer per agent: [P, B, in], [P, in, out], [P, 1, out] -> [P, B, out]."""
    return torch.baddbmm(bias, x, weight)


def activate(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """Apply each agent's activation to [P * copies, ...]; may overwrite x if all agents share one activation."""
    if len(spans) == 1:
        activation = ACTIVATIONS[spans[0][0]]
        return (activation.in_place or activation.function)(x)
    copies = x.shape[0] // spans[-1][2]
    return torch.cat([ACTIVATIONS[name].function(x[start * copies : stop * copies]) for name, start, stop in spans])


def activation_gradient(gradient: Tensor, x: Tensor, y: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the gradient of x [P * copies, ...] from that of y = activate(x)."""
    if len(spans) == 1:
        return ACTIVATIONS[spans[0][0]].gradient(gradient, x, y)
    copies = x.shape[0] // spans[-1][2]
    parts = [(name, slice(start * copies, stop * copies)) for name, start, stop in spans]
    return torch.cat([ACTIVATIONS[name].gradient(gradient[part], x[part], y[part]) for name, part in parts])


def repeated(x: Tensor, copies: int) -> Tensor:
    """Repeat each agent's values `copies` times: [P, ...] -> [P * copies, ...]."""
    return x if copies == 1 else x.unsqueeze(1).expand(-1, copies, *x.shape[1:]).flatten(0, 1)


def layer_norm(
    x: Tensor, gain: Tensor, shift: Tensor, share: Tensor | None, epsilon: float = 1e-5
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Apply layer norm (arXiv 1607.06450) to [P, B, N], with `share` [P, N, 1] as unit weights in the statistics.

    Statistics over part of the units suffice (arXiv 1910.07467). So a layer can grow without changing its output:
    padding and units added to a trained layer are never included. Without `share`, all units have equal weight. Also
    return the tensors for the backward pass.
    """
    if share is None:
        # One fused operation instead of seven.
        normal, mean, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, epsilon)
        return torch.addcmul(shift, normal, gain), (normal, scale, x, mean)
    centred = x - torch.bmm(x, share)
    scale = torch.bmm(centred.square(), share).add_(epsilon).rsqrt_()
    normal = centred.mul_(scale)
    return torch.addcmul(shift, normal, gain), (normal, scale)


def layer_norm_gradient(gradient: Tensor, gain: Tensor, share: Tensor | None, norm: tuple[Tensor, ...]) -> Tensor:
    """Return the gradient of x [P, B, N] from that of the output of `layer_norm`."""
    normal, scale, *more = norm
    inner = gradient * gain
    if share is None:
        x, mean = more
        wanted = [True, False, False]
        # The kernel assumes contiguous statistics.
        statistics = mean.contiguous(), scale.contiguous()
        found: Tensor = aten.native_layer_norm_backward(inner, x, x.shape[-1:], *statistics, None, None, wanted)[0]
        return found
    # Each included unit affects mean and variance by its share; d normal / d x follows from the quotient rule.
    moved = torch.addcmul(inner.sum(-1, keepdim=True), normal, (inner * normal).sum(-1, keepdim=True))
    return torch.addcmul(inner, moved, share.mT, value=-1).mul_(scale)


def shares(counted: Tensor) -> Tensor:
    """Return each unit's weight [P, N, 1] in a mean over the units with `counted` [P, 1, N] equal to 1."""
    return (counted / counted.sum(-1, keepdim=True).clamp(min=1)).transpose(1, 2).contiguous()
