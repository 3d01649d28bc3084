"""Reward and advantage scaling. Pure functions. Axes: T time, P agents, B batch."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(reward: Tensor, ended: Tensor, discount: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return running discounted sums [T, P, B] of past rewards in each episode, and the carry [P, B].

    `reward` and `ended` are [T, P, B], `discount` is [P], `before` [P, B] is the carry of the last call.
    """
    sums = torch.empty_like(reward)
    factor = discount.unsqueeze(-1)
    for time in range(reward.shape[0]):
        sums[time] = before * factor + reward[time]
        before = sums[time].masked_fill(ended[time], 0.0)
    return sums, before


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., B] with mean 0 and variance 1 under `weight` [..., B], which sums to 1."""
    centred = x - (x * weight).sum(-1, keepdim=True)
    variance = (centred.square() * weight).sum(-1, keepdim=True)
    return centred * torch.rsqrt(variance + 1e-8)
