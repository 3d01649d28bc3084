"""Frame stacking from frames that are stored once. Axes: N streams, B batch, F frames."""

from __future__ import annotations

import torch
from torch import Tensor


def next_age(before: Tensor, started: Tensor, depth: int) -> Tensor:
    """Return the number of earlier frames [N] of the episode available to a row, from that of the previous row.

    It is capped at `depth` - 1, all that a stack shows.
    """
    return (before + 1).clamp_(max=depth - 1).masked_fill_(started, 0)


def stack_places(slots: Tensor, age: Tensor, frames: int, streams: int, slot_count: int) -> Tensor:
    """Return the storage indices [B, F] of the frames in the stacks at `slots` [B], newest last.

    Frames before the episode's first, by `age` [B], map to index `slot_count`, which holds a zero frame.
    """
    ago = torch.arange(frames - 1, -1, -1, device=slots.device)
    places = (slots.unsqueeze(-1) - ago * streams) % slot_count
    return places.masked_fill_(ago > age.unsqueeze(-1), slot_count)
