"""Stacks of successive frames out of frames that are kept once. Axes: N streams, B batch, F frames."""

from __future__ import annotations

import torch
from torch import Tensor


def next_age(before: Tensor, started: Tensor, depth: int) -> Tensor:
    """Return how many earlier frames [N] of the episode a row can show, given those of the row before it.

    More than `depth` - 1 are not counted: stacks show no more.
    """
    return (before + 1).clamp_(max=depth - 1).masked_fill_(started, 0)


def stack_places(slots: Tensor, age: Tensor, frames: int, streams: int, slot_count: int) -> Tensor:
    """Return where the stacks' frames [B, F] stand that are seen at `slots` [B], the newest last.

    What lies before an episode's first frame, by `age` [B], stands at place `slot_count`, where a frame of zeros is.
    """
    ago = torch.arange(frames - 1, -1, -1, device=slots.device)
    places = (slots.unsqueeze(-1) - ago * streams) % slot_count
    return places.masked_fill_(ago > age.unsqueeze(-1), slot_count)
