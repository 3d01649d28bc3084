"""Layers with a leading agent axis. Axes: P agents, B batch, N units.

Units beyond an agent's own width have zero weights and biases. Every activation here maps 0 to 0, so such units put out
zero, get zero gradients and stay as they are: padding needs no mask, except in the statistics of a layer norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}

IN_PLACE: Mapping[str, Activation] = {"relu": torch.relu_}
"""Activations that may overwrite their input, where all agents share one: 11 to 16 % of a pass."""

Span = tuple[str, int, int]
"""An activation and the agents, from start to stop, that use it."""


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear map: [P, B, in], [P, in, out], [P, 1, out] -> [P, B, out]."""
    return torch.baddbmm(bias, x, weight)


def activate(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """Apply each agent's own activation to [P * copies, ...]; agents that share one stand side by side."""
    if len(spans) == 1:
        name = spans[0][0]
        return IN_PLACE.get(name, ACTIVATIONS[name])(x)
    copies = x.shape[0] // spans[-1][2]
    return torch.cat([ACTIVATIONS[name](x[start * copies : stop * copies]) for name, start, stop in spans])


def repeated(x: Tensor, copies: int) -> Tensor:
    """Repeat each agent's values `copies` times: [P, ...] -> [P * copies, ...]."""
    return x if copies == 1 else x.unsqueeze(1).expand(-1, copies, *x.shape[1:]).flatten(0, 1)


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, share: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """Normalise [P, B, N] (arXiv 1607.06450) by the statistics of the units that count, with `share` [P, N, 1] in them.

    A norm over part of the units is enough (arXiv 1910.07467), which lets a layer grow without changing what it puts
    out: padding never counts, nor do units that were added to a trained layer. Without `share` all count alike.
    """
    if share is None:
        # One fused operation instead of seven.
        return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=epsilon), gain)
    centred = x - torch.bmm(x, share)
    variance = torch.bmm(centred.square(), share)
    return torch.addcmul(shift, centred * torch.rsqrt(variance + epsilon), gain)


def shares(counted: Tensor) -> Tensor:
    """Return the share [P, N, 1] that each unit has in a mean over those that are `counted` [P, 1, N]."""
    return (counted / counted.sum(-1, keepdim=True).clamp(min=1)).transpose(1, 2).contiguous()
