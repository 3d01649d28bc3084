"""Layers with a leading agent axis. Axes: P agents, B batch, N units.

Units beyond an agent's own width have zero weights and biases. Every activation here maps 0 to 0, so such units put out
zero, get zero gradients and stay as they are: padding needs no mask, except in the statistics of a layer norm.
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

    `in_place` overwrites x by y, for those whose gradient needs y alone: 11 to 16 % of a forward pass.
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
"""An activation and the agents, from start to stop, that use it."""


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear map: [P, B, in], [P, in, out], [P, 1, out] -> [P, B, out]."""
    return torch.baddbmm(bias, x, weight)


def activate(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """Apply each agent's own activation to [P * copies, ...]; where all share one it may overwrite x."""
    if len(spans) == 1:
        activation = ACTIVATIONS[spans[0][0]]
        return (activation.in_place or activation.function)(x)
    copies = x.shape[0] // spans[-1][2]
    return torch.cat([ACTIVATIONS[name].function(x[start * copies : stop * copies]) for name, start, stop in spans])


def activation_gradient(gradient: Tensor, x: Tensor, y: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the gradient of x [P * copies, ...] from that of y, which `activate` made of it."""
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
    """Normalise [P, B, N] (arXiv 1607.06450) by the statistics of the units that count, with `share` [P, N, 1] in them.

    A norm over part of the units is enough (arXiv 1910.07467), which lets a layer grow without changing what it puts
    out: padding never counts, nor do units that were added to a trained layer. Without `share` all count alike. Also
    return what the gradient needs.
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
    """Return the gradient of x [P, B, N] from that of what `layer_norm` made of it."""
    normal, scale, *more = norm
    inner = gradient * gain
    if share is None:
        x, mean = more
        wanted = [True, False, False]
        # It takes for granted that there are no gaps in statistics.
        statistics = mean.contiguous(), scale.contiguous()
        found: Tensor = aten.native_layer_norm_backward(inner, x, x.shape[-1:], *statistics, None, None, wanted)[0]
        return found
    # Each unit that counts moves mean and variance by its share; d normal / d x by the quotient rule.
    moved = torch.addcmul(inner.sum(-1, keepdim=True), normal, (inner * normal).sum(-1, keepdim=True))
    return torch.addcmul(inner, moved, share.mT, value=-1).mul_(scale)


def shares(counted: Tensor) -> Tensor:
    """Return the share [P, N, 1] that each unit has in a mean over those that are `counted` [P, 1, N]."""
    return (counted / counted.sum(-1, keepdim=True).clamp(min=1)).transpose(1, 2).contiguous()
