"""The targets of values: returns and advantages. Pure functions. Axes: T time, P agents, B batch, N atoms."""

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


def bootstrapped_atoms(columns: Mapping[str, Tensor], discount: Tensor, next_atoms: Tensor) -> Tensor:
    """Return the same [P, B, N] of the atoms [P, B, N] of a distribution of returns (arXiv 1707.06887, eq. 7)."""
    factor = columns.get("discount", discount.unsqueeze(-1)).unsqueeze(-1)
    atoms = next_atoms.masked_fill(columns["terminated"].unsqueeze(-1), 0.0)
    return torch.addcmul(columns["reward"].unsqueeze(-1), factor, atoms)


def categorical_projection(probabilities: Tensor, returns: Tensor, v_min: float, v_max: float) -> Tensor:
    """Return the probabilities [P, B, N] of N evenly spaced values from `v_min` to `v_max` (arXiv 1707.06887, alg. 1).

    Each of the `returns` [P, B, N] gives its probability to the two values next to it, in proportion to its nearness;
    what lies outside goes to the nearest end. On a GPU the order of additions, and so the last bit, is not fixed.
    """
    atoms = probabilities.shape[-1]
    place = (returns.clamp(v_min, v_max) - v_min) * ((atoms - 1) / (v_max - v_min))
    # Bounds on whole numbers, because what is no number has no place and must still be an index.
    lower = place.long().clamp_(0, atoms - 2)
    upper_share = probabilities * (place - lower)
    projected = torch.zeros_like(probabilities).scatter_add_(-1, lower, probabilities - upper_share)
    return projected.scatter_add_(-1, lower + 1, upper_share)


def of_action(atoms: Tensor, action: Tensor) -> Tensor:
    """Return the atoms [P, B, N] of one action [P, B] of each, out of those of all actions [P, B, A, N]."""
    return atoms.gather(-2, atom_index(action, atoms.shape[-1])).squeeze(-2)


def atom_index(action: Tensor, atoms: int) -> Tensor:
    """Return the places [P, B, 1, N] of the atoms of one action [P, B] of each among those of all, [P, B, A, N]."""
    return action.unsqueeze(-1).unsqueeze(-1).expand(*action.shape, 1, atoms)


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


def v_trace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    discount: Tensor,
    trace: Tensor,
    rho_clip: Tensor,
    c_clip: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return V-trace targets of values, and advantages, both [T, P, B] (arXiv 1802.01561, eq. 1 and section 4.2).

    `log_ratio` is the log-probability of each action under the policy that learns less that under the one that acted;
    its exponential is cut at `rho_clip` in errors and at `c_clip` in what flows back, times `trace` (remark 2), each
    [P] like `discount`. `reward`, `value` of the state acted in, `next_value` of the state reached and `terminated` are
    [T, P, B]; `ended` says where an episode ended in either way, so that nothing flows back over it. The state reached
    by a truncated step, and by the last one, is valued by `next_value` alone.

    The advantage of a step is rho (r + discount q - V) with q = trace v' + (1 - trace) V', where v' is the target and
    V' the value of the state reached. With a `trace` of 1 that is the paper's r + discount v'. The mixture, as in
    `vtrace_td_error_and_advantage` of rlax, keeps advantages in step with targets: where both policies are one,
    advantages are generalised advantage estimates with lambda = `trace`, and targets are those plus the value.
    """
    ratio = log_ratio.exp()
    rho = torch.minimum(ratio, rho_clip.unsqueeze(-1))
    decay = (discount * trace).unsqueeze(-1) * torch.minimum(ratio, c_clip.unsqueeze(-1)) * (~ended)
    error = rho * (one_step_return(reward, terminated, discount, next_value) - value)
    target = torch.empty_like(error)
    later = torch.zeros_like(error[0])
    for time in range(error.shape[0] - 1, -1, -1):
        later = torch.addcmul(error[time], decay[time], later, out=target[time])
    target += value
    following = next_value.clone()
    mixed = torch.lerp(next_value[:-1], target[1:], trace.unsqueeze(-1))
    following[:-1] = torch.where(ended[:-1], next_value[:-1], mixed)
    advantage = rho * (one_step_return(reward, terminated, discount, following) - value)
    return target, advantage
