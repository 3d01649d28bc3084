"""The targets of values: returns and advantages. Pure functions. Axes: T time, P agents, B batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def one_step_return(reward: Tensor, terminated: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Return reward + discount * next_value, without the latter where terminated (Sutton & Barto 2018, eq. 6.1).

    `reward`, `terminated` and `next_value` are [P, B], `discount` is [P]. A truncated episode still bootstraps.
    """
    return torch.addcmul(reward, discount.unsqueeze(-1), next_value.masked_fill(terminated, 0.0))


def n_step_return(reward: Tensor, steps: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
    """Return the discounted sum of the first `steps` rewards, and the discount of the state that they led to.

    With R = r_0 + g r_1 + ... + g^(k-1) r_(k-1) and g^k, the target of k steps is R + g^k V (Sutton & Barto 2018,
    eq. 7.1). `reward` is [..., P, B, n], `steps` [..., P, B] from 1 to n, `discount` [P]; both results are [..., P, B].
    """
    count = torch.arange(reward.shape[-1], device=reward.device)
    factor = discount.unsqueeze(-1)
    # What stands behind the end of a window is of another episode, or nothing at all.
    counted = reward.masked_fill(count >= steps.unsqueeze(-1), 0.0)
    return (counted * (factor**count).unsqueeze(-2)).sum(-1), factor**steps


def bootstrapped_return(columns: Mapping[str, Tensor], discount: Tensor, next_value: Tensor) -> Tensor:
    """Return the targets [P, B] of transitions out of a replay, of one step or of several.

    `columns` have `reward` and `terminated` [P, B], and where `reward` is an `n_step_return` also `discount` [P, B];
    else the agents' `discount` [P] holds. `next_value` [P, B] is that of the next observation.
    """
    factor = columns.get("discount", discount.unsqueeze(-1))
    return torch.addcmul(columns["reward"], factor, next_value.masked_fill(columns["terminated"], 0.0))


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
