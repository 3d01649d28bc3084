"""The targets of values: returns and advantages. Pure functions. Axes: T time, P agents, B batch."""

from __future__ import annotations

import torch
from torch import Tensor


def one_step_return(reward: Tensor, terminated: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Return reward + discount * next_value, without the latter where terminated (Sutton & Barto 2018, eq. 6.1).

    `reward`, `terminated` and `next_value` are [P, B], `discount` is [P]. A truncated episode still bootstraps.
    """
    return reward + discount.unsqueeze(-1) * next_value.masked_fill(terminated, 0.0)


def double_q_value(online_next_q: Tensor, target_next_q: Tensor) -> Tensor:
    """Return the target network's value of the online network's best action (double Q-learning, arXiv 1509.06461).

    Both are [P, B, actions]; the value is [P, B].
    """
    return target_next_q.gather(-1, online_next_q.argmax(-1, keepdim=True)).squeeze(-1)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    discount: Tensor,
    gae_lambda: Tensor,
) -> Tensor:
    """Return generalised advantage estimates [T, P, B] (arXiv 1506.02438, eq. 16).

    `reward`, `value` of the state acted in, `next_value` of the state reached, and `terminated` are [T, P, B]; `ended`
    says where an episode ended in either way, so that nothing flows back over it. `discount` and `gae_lambda` are
    [P]. The state reached by a truncated step is valued like any other.
    """
    error = one_step_return(reward, terminated, discount, next_value) - value
    decay = (discount * gae_lambda).unsqueeze(-1) * (~ended)
    advantage = torch.empty_like(error)
    later = torch.zeros_like(error[0])
    for time in range(error.shape[0] - 1, -1, -1):
        later = torch.addcmul(error[time], decay[time], later, out=advantage[time])
    return advantage
