"""Layers and recurrent cells with a leading agent axis.

Axes: P agents (times streams where heads have layers of their own), T time, B batch or sequences, N units, K numbers
per unit.

Padding units beyond an agent's own width have zero weights and biases. Every activation here maps 0 to 0, and cells map
zero weights and a zero state to zero, so padding units output zero, get zero gradients and never change. Padding needs
no mask except in layer norm statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from evorl.types import RecurrentInput


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
    """Apply each agent's activation to [P * streams, ...]; may overwrite x if all agents share one activation."""
    if len(spans) == 1:
        activation = ACTIVATIONS[spans[0][0]]
        return (activation.in_place or activation.function)(x)
    streams = x.shape[0] // spans[-1][2]
    return torch.cat([ACTIVATIONS[name].function(x[start * streams : stop * streams]) for name, start, stop in spans])


def activation_gradient(gradient: Tensor, x: Tensor, y: Tensor, spans: Sequence[Span]) -> Tensor:
    """Backpropagate from y = activate(x) to x [P * streams, ...]."""
    if len(spans) == 1:
        return ACTIVATIONS[spans[0][0]].gradient(gradient, x, y)
    streams = x.shape[0] // spans[-1][2]
    parts = [(name, slice(start * streams, stop * streams)) for name, start, stop in spans]
    return torch.cat([ACTIVATIONS[name].gradient(gradient[part], x[part], y[part]) for name, part in parts])


def repeated(x: Tensor, streams: int) -> Tensor:
    """Repeat each agent's values `streams` times: [P, ...] -> [P * streams, ...]."""
    return x if streams == 1 else x.unsqueeze(1).expand(-1, streams, *x.shape[1:]).flatten(0, 1)


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
    """Backpropagate from the output of `layer_norm` to x [P, B, N]; `norm` is what it saved."""
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
    """The weight [P, N, 1] of each unit in a mean over the units whose `counted` [P, 1, N] is 1."""
    return (counted / counted.sum(-1, keepdim=True).clamp(min=1)).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Cell:
    """A recurrent cell with `gates` per unit and state [P, B, K, N], where K = `slots` and slot 0 is the output.

    `biases` are the initial biases of the gates; padding units have zero biases, which keep their state at zero as
    well. `step` maps the gates' input contribution [P, B, gates * N], the recurrent weight [P, N, gates * N] and the
    state [P, B, K, N] to the next state.
    """

    biases: tuple[float, ...]
    slots: int
    step: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def gates(self) -> int:
        return len(self.biases)


def _lstm(given: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Compute one LSTM step (Hochreiter & Schmidhuber 1997) with forget gates (Gers et al. 2000)."""
    output, cell = state.unbind(2)
    entry, forget, candidate, exit_ = torch.baddbmm(given, output, weight).chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(candidate)
    return torch.stack((torch.sigmoid(exit_) * torch.tanh(cell), cell), 2)


def _gru(given: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Compute one GRU step (arXiv 1406.1078), with the reset gate applied after the product, as in cuDNN."""
    output = state[:, :, 0]
    reset, update, candidate = given.chunk(3, -1)
    from_reset, from_update, from_candidate = torch.bmm(output, weight).chunk(3, -1)
    proposal = torch.tanh(candidate + torch.sigmoid(reset + from_reset) * from_candidate)
    keep = torch.sigmoid(update + from_update)
    return (proposal + keep * (output - proposal)).unsqueeze(2)


FORGET = 1.0
"""Initial bias of an LSTM's forget gate: with 0 a unit would forget half of its state at each step (Jozefowicz et al.
2015)."""

CELLS: Mapping[str, Cell] = {
    "lstm": Cell((0.0, FORGET, 0.0, 0.0), 2, _lstm),
    "gru": Cell((0.0, 0.0, 0.0), 1, _gru),
}


def unroll(cell: Cell, given: Tensor, weight: Tensor, state: Tensor, started: Tensor) -> tuple[Tensor, Tensor]:
    """Unroll a cell over time; return the outputs [P, T, B, N] and the final recurrent state [P, B, K, N].

    `given` [P, T, B, gates * N] is the input contribution to the gates. Where `started` [P, T, B] is true, an episode
    starts and the state is reset to zero.
    """
    kept = (~started).to(given.dtype)[..., None, None]
    outputs = []
    for time in range(given.shape[1]):
        state = cell.step(given[:, time], weight, state * kept[:, time])
        outputs.append(state[:, :, 0])
    return torch.stack(outputs, 1), state


def recur(
    cell: Cell, streams: int, p: Mapping[str, Tensor], hidden: Tensor, recurrent: RecurrentInput
) -> tuple[Tensor, Tensor]:
    """Apply a cell to a layer's output; return [P * streams, T * B, N] and the next state [P, B, K, N]."""
    given = linear(hidden, p["recurrent.input"], p["recurrent.bias"])
    started = repeated(recurrent.started, streams)
    given = given.unflatten(1, started.shape[1:])
    # [P, B, streams * slots, N] -> [P * streams, B, slots, N]
    state = recurrent.state.unflatten(2, (streams, cell.slots)).transpose(1, 2).flatten(0, 1)
    outputs, state = unroll(cell, given, p["recurrent.weight"], state, started)
    state = state.unflatten(0, (-1, streams)).transpose(1, 2).flatten(2, 3)
    return outputs.flatten(1, 2), state
