"""Recurrent cells with a leading agent axis.

Axes: P agents (times branches where heads have cells of their own), T time, B sequences, N units, K numbers per unit.

Cells map zero weights and a zero state to zero, so padding units stay zero, as in `dense.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evorl.networks.dense import linear, repeated
from evorl.types.batches import RecurrentInput


@dataclass(frozen=True)
class Cell:
    """A recurrent cell with state [P, B, K, N], where K = `slots` and slot 0 is the output, and G gates per unit.

    `biases` are the initial biases of the G gates; padding units have zero biases, which keep their state at zero as
    well. `step` maps the gates' input contribution [P, B, G * N], the recurrent weight [P, N, G * N] and the
    state [P, B, K, N] to the next state.
    """

    biases: tuple[float, ...]
    slots: int
    step: Callable[[Tensor, Tensor, Tensor], Tensor]


def _lstm(gates: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Compute one LSTM step (Hochreiter & Schmidhuber 1997) with forget gates (Gers et al. 2000)."""
    output, cell = state.unbind(2)
    entry, forget, candidate, exit_ = torch.baddbmm(gates, output, weight).chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(candidate)
    return torch.stack((torch.sigmoid(exit_) * torch.tanh(cell), cell), 2)


def _gru(gates: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Compute one GRU step (arXiv 1406.1078), with the reset gate applied after the product, as in cuDNN."""
    output = state[:, :, 0]
    reset, update, candidate = gates.chunk(3, -1)
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


def unroll(cell: Cell, gates: Tensor, weight: Tensor, state: Tensor, started: Tensor) -> tuple[Tensor, Tensor]:
    """Unroll a cell over time; return the outputs [P, T, B, N] and the final recurrent state [P, B, K, N].

    `gates` [P, T, B, gates * N] is the input contribution to the gates. Where `started` [P, T, B] is true, an episode
    starts and the state is reset to zero.
    """
    goes_on = (~started).to(gates.dtype)[..., None, None]
    outputs = []
    # The gradient of `gates[:, time]` would be a tensor of all T steps.
    for gate, kept in zip(gates.unbind(1), goes_on.unbind(1), strict=True):
        state = cell.step(gate, weight, state * kept)
        outputs.append(state[:, :, 0])
    return torch.stack(outputs, 1), state


def recur(
    cell: Cell, branches: int, p: Mapping[str, Tensor], hidden: Tensor, recurrent: RecurrentInput
) -> tuple[Tensor, Tensor]:
    """Apply a cell to a layer's output; return [P * branches, T * B, N] and the next state [P, B, K, N]."""
    gates = linear(hidden, p["recurrent.input"], p["recurrent.bias"])
    started = repeated(recurrent.started, branches)
    gates = gates.unflatten(1, started.shape[1:])
    # [P, B, branches * slots, N] -> [P * branches, B, slots, N]
    state = recurrent.state.unflatten(2, (branches, cell.slots)).transpose(1, 2).flatten(0, 1)
    outputs, state = unroll(cell, gates, p["recurrent.weight"], state, started)
    state = state.unflatten(0, (-1, branches)).transpose(1, 2).flatten(2, 3)
    return outputs.flatten(1, 2), state
