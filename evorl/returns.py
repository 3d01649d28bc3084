"""What a value should have been. Pure functions. Axes: P agents, B batch."""

from __future__ import annotations

from torch import Tensor


def one_step_return(reward: Tensor, terminated: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """reward + discount * next_value, without the latter where the episode terminated (Sutton & Barto 2018, eq. 6.1).

    `reward`, `terminated` and `next_value` are [P, B], `discount` is [P]. A truncated episode still bootstraps.
    """
    return reward + discount.unsqueeze(-1) * next_value.masked_fill(terminated, 0.0)


def double_q_value(online_next_q: Tensor, target_next_q: Tensor) -> Tensor:
    """The target network's value of the action that the online network prefers (double Q-learning, arXiv 1509.06461).

    Both are [P, B, actions]; the value is [P, B].
    """
    return target_next_q.gather(-1, online_next_q.argmax(-1, keepdim=True)).squeeze(-1)
