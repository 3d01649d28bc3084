"""Value targets: returns and advantages. Pure functions. Axes: T time, P agents, B batch, N atoms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def one_step_return(reward: Tensor, terminated: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Return the one-step target reward + discount * next_value [P, B] (Sutton & Barto 2018, eq. 6.1).

    `reward`, `terminated` and `next_value` are [P, B], `discount` is [P]. A terminated step does not bootstrap; a
    truncated one does.
    """
    return torch.addcmul(reward, discount.unsqueeze(-1), next_value.masked_fill(terminated, 0.0))


def n_step_return(reward: Tensor, steps: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
    """Return the discounted sum of the first `steps` rewards, and the discount of the state that they lead to.

    These are R = r_0 + g r_1 + ... + g^(k-1) r_(k-1) and g^k of the k-step target R + g^k V (Sutton & Barto 2018,
    eq. 7.1). `reward` is [..., P, B, n], `steps` [..., P, B] from 1 to n, `discount` [P]; both results are [..., P, B].
    """
    count = torch.arange(reward.shape[-1], device=reward.device)
    factor = discount.unsqueeze(-1)
    # Rewards after the end of a window belong to another episode or are undefined.
    counted = reward.masked_fill(count >= steps.unsqueeze(-1), 0.0)
    return (counted * (factor**count).unsqueeze(-2)).sum(-1), factor**steps


def bootstrapped_return(columns: Mapping[str, Tensor], discount: Tensor, next_value: Tensor) -> Tensor:
    """Return the one-step or n-step targets [P, B] of replayed transitions.

    `columns` holds `reward` and `terminated` [P, B], and if `reward` is an `n_step_return` also `discount` [P, B];
    otherwise the agents' `discount` [P] applies. `next_value` [P, B] is that of the next observation.
    """
    factor = columns.get("discount", discount.unsqueeze(-1))
    return torch.addcmul(columns["reward"], factor, next_value.masked_fill(columns["terminated"], 0.0))


def bootstrapped_atoms(columns: Mapping[str, Tensor], discount: Tensor, next_atoms: Tensor) -> Tensor:
    """Return the targets [P, B, N] of the atoms [P, B, N] of a return distribution (arXiv 1707.06887, eq. 7).

    Arguments are those of `bootstrapped_return`.
    """
    factor = columns.get("discount", discount.unsqueeze(-1)).unsqueeze(-1)
    atoms = next_atoms.masked_fill(columns["terminated"].unsqueeze(-1), 0.0)
    return torch.addcmul(columns["reward"].unsqueeze(-1), factor, atoms)


def categorical_projection(probabilities: Tensor, returns: Tensor, v_min: float, v_max: float) -> Tensor:
    """Project a return distribution onto N evenly spaced values from `v_min` to `v_max` (arXiv 1707.06887, alg. 1).

    Each of the `returns` [P, B, N] splits its probability between its two neighbouring values, in proportion to its
    nearness; returns outside the support go to the nearest end. Returns the probabilities [P, B, N]. On a GPU the order
    of additions, and so the last bit, is not fixed.
    """
    atoms = probabilities.shape[-1]
    place = (returns.clamp(v_min, v_max) - v_min) * ((atoms - 1) / (v_max - v_min))
    # Clamp after the conversion to integers, so that NaN too becomes a valid index.
    lower = place.long().clamp_(0, atoms - 2)
    upper_share = probabilities * (place - lower)
    projected = torch.zeros_like(probabilities).scatter_add_(-1, lower, probabilities - upper_share)
    return projected.scatter_add_(-1, lower + 1, upper_share)


def of_action(atoms: Tensor, action: Tensor) -> Tensor:
    """Return the atoms [P, B, N] of the chosen `action` [P, B] out of those of all actions [P, B, A, N]."""
    return atoms.gather(-2, atom_index(action, atoms.shape[-1])).squeeze(-2)


def atom_index(action: Tensor, atoms: int) -> Tensor:
    """Return the gather index [P, B, 1, N] of the chosen `action` [P, B] into all actions' atoms [P, B, A, N]."""
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

    `reward`, `value` V(s), `next_value` V(s') and `terminated` are [T, P, B]. `ended` [T, P, B] marks where an episode
    terminated or was truncated, across which no advantage flows back. `discount` and `gae_lambda` are [P]. A truncated
    step bootstraps from `next_value` like any other.
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
    """Return V-trace value targets and advantages, both [T, P, B] (arXiv 1802.01561, eq. 1 and section 4.2).

    `log_ratio` is each action's log-probability under the target policy minus that under the behaviour policy. The
    importance weight, its exponential, is clipped at `rho_clip` in td_errors, and at `c_clip`, times `trace` (remark
    2), in the trace coefficients; each of these is [P], like `discount`. `reward`, `value` V(s), `next_value` V(s') and
    `terminated` are [T, P, B]. `ended` marks where an episode terminated or was truncated, across which nothing flows
    back. A truncated step, and the last one, bootstrap from `next_value` alone.

    The advantage of a step is rho (r + discount q - V) with q = trace v' + (1 - trace) V', where v' is the target and
    V' the value of the next state. With a `trace` of 1, r + discount q is the paper's r + discount v'. The mixture, as
    in `vtrace_td_error_and_advantage` of rlax, keeps advantages consistent with targets: on-policy, advantages are
    generalised advantage estimates with lambda = `trace`, and targets are those plus the value.
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
