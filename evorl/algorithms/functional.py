"""Losses, returns and advantages: each formula once, as its paper has it. Pure functions.

Functions raise ValueError for tensors whose shapes differ where they must not, since broadcasting [P, B] against
[P, B, 1] would silently compute something else.

Axes: T time, P agents, B batch, A actions, N atoms of a return distribution, M samples of one. In
functions of rollouts, B stands for environments or sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from evorl.types.batches import Segment

MAX_WORKER_RATIO = 2.0
"""Upper bound on the ratio of the worker's to the target network's action probability (arXiv 1912.00167, section 3)."""
LARGEST_LOG_RATIO = 80.0
"""The log-ratio of action probabilities above which their ratio could overflow in float32."""


# Losses of values


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy -sum_n p_n log softmax(l)_n [P, B] between `target` p and the softmax of `logits` l (C51's loss).

    Both are [P, B, N], and the target's probabilities sum to 1. Source: arXiv 1707.06887, alg. 1.
    """
    _same_shape("cross_entropy", logits=logits, target=target)
    return -(target * logits.log_softmax(-1)).sum(-1)


def quantile_huber(quantiles: Tensor, samples: Tensor, kappa: float) -> Tensor:
    """Quantile Huber loss [P, B] of `quantiles` q [P, B, N] for `samples` x [P, B, M] (arXiv 1710.10044, eq. 9 and 10).

    The loss is sum_i mean_j |tau_i - 1{u < 0}| H(u) / kappa with u = x_j - q_i, tau_i = (i + 1/2) / N (i counts from
    0) and H the Huber loss with threshold kappa; the division by kappa is that of arXiv 1806.06923. With a `kappa` of
    0, |u| stands for H(u) / kappa: it is the quantile regression loss.
    """
    if quantiles.shape[:-1] != samples.shape[:-1]:
        raise ValueError(f"quantile_huber: quantiles {list(quantiles.shape)} and samples {list(samples.shape)} differ")
    atoms = quantiles.shape[-1]
    tau = ((torch.arange(atoms, device=quantiles.device).to(quantiles) + 0.5) / atoms).unsqueeze(-1)
    u = samples.unsqueeze(-2) - quantiles.unsqueeze(-1)
    asymmetry = torch.where(u < 0, 1 - tau, tau)
    size = functional.huber_loss(u, torch.zeros_like(u), reduction="none", delta=kappa) / kappa if kappa else u.abs()
    return (asymmetry * size).mean(-1).sum(-1)


# Losses of policies


def policy_gradient(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Policy-gradient loss -log pi(a|s) A [P, B] of REINFORCE (Williams 1992) with a baseline."""
    _same_shape("policy_gradient", log_prob=log_prob, advantage=advantage)
    return -log_prob * advantage


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: Tensor) -> Tensor:
    """Negative clipped surrogate of PPO, -min(r A, clamp(r, 1 - clip, 1 + clip) A) [P, B] (arXiv 1707.06347, eq. 7).

    `log_ratio` log r [P, B] is the new log-probability minus the old one, `advantage` A [P, B], `clip` [P].
    """
    _same_shape("clipped_surrogate", log_ratio=log_ratio, advantage=advantage)
    # Beyond float32's range the clipped ratio has no gradient, and 0 * inf would be NaN.
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    # The equal min(r A, A + clip |A|) has a gradient in one place alone, which takes 40 us instead of 60.
    return -torch.minimum(ratio * advantage, torch.addcmul(advantage, clip.unsqueeze(-1), advantage.abs()))


def impact_log_ratio(log_prob: Tensor, worker_log_prob: Tensor, target_log_ratio: Tensor) -> Tensor:
    """Log-ratio log(min(worker / target, 2) policy / worker) [P, B] of IMPACT (arXiv 1912.00167, section 3).

    `log_prob` is the policy's, and `target_log_ratio` the target network's log-probability minus the worker's.
    """
    return log_prob - worker_log_prob + (-target_log_ratio).clamp(max=math.log(MAX_WORKER_RATIO))


def temperature_loss(log_temperature: Tensor, entropy: Tensor, target_entropy: Tensor) -> Tensor:
    """Temperature loss log alpha (H - H_target) [P, B], which raises alpha where entropy is low (1812.05905, eq. 18).

    As in the authors' code, log alpha stands in place of alpha; the gradient has the same sign. `entropy` is [P, B],
    `log_temperature` [P, 1], and `target_entropy` [P, 1] or [P, B].
    """
    return log_temperature * (entropy - target_entropy)


# Action values


def of_action(atoms: Tensor, action: Tensor) -> Tensor:
    """The atoms [P, B, N] of the chosen `action` [P, B] out of those of all actions [P, B, A, N]."""
    index = action.unsqueeze(-1).unsqueeze(-1).expand(*action.shape, 1, atoms.shape[-1])
    return atoms.gather(-2, index).squeeze(-2)


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """Action values V + A_a - mean_a A_a [P, B, A, N] of a dueling network (arXiv 1511.06581, eq. 9).

    `value` is [P, B, N], `advantage` [P, B, A, N].
    """
    return value.unsqueeze(-2) + advantage - advantage.mean(-2, keepdim=True)


# Targets of one transition or n-step window


def td_target(reward: Tensor, terminated: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """One-step or n-step target r + discount V(s') (Sutton & Barto 2018, eq. 6.1 and 7.1).

    A terminated step does not bootstrap; a truncated one does. All have the shape of `next_value`, or broadcast to it.
    """
    return torch.addcmul(reward, discount, next_value.masked_fill(terminated, 0.0))


def n_step_return(reward: Tensor, steps: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
    """The discounted sum of the first `steps` rewards, and the discount of the state that they lead to.

    These are R = r_0 + g r_1 + ... + g^(k-1) r_(k-1) and g^k of the k-step target R + g^k V (Sutton & Barto 2018,
    eq. 7.1). `reward` is [..., P, B, n], `steps` [..., P, B] from 1 to n, `discount` [P]; both results are [..., P, B].
    """
    _same_shape("n_step_return", first_reward=reward[..., 0], steps=steps)
    count = torch.arange(reward.shape[-1], device=reward.device)
    factor = discount.unsqueeze(-1)
    # Rewards after the end of a window belong to another episode or are undefined.
    within = reward.masked_fill(count >= steps.unsqueeze(-1), 0.0)
    return (within * (factor**count).unsqueeze(-2)).sum(-1), factor**steps


def bootstrapped_return(columns: Mapping[str, Tensor], discount: Tensor, next_value: Tensor) -> Tensor:
    """One-step or n-step targets [P, B] of replayed transitions, from the values [P, B] of their next observations.

    `columns` holds `reward` and `terminated` [P, B], and if `reward` is an `n_step_return` also `discount` [P, B];
    otherwise the agents' `discount` [P] applies.
    """
    _same_shape("bootstrapped_return", reward=columns["reward"], next_value=next_value)
    factor = columns.get("discount", discount.unsqueeze(-1))
    return td_target(columns["reward"], columns["terminated"], factor, next_value)


def bootstrapped_atoms(columns: Mapping[str, Tensor], discount: Tensor, next_atoms: Tensor) -> Tensor:
    """Targets [P, B, N] of the atoms [P, B, N] of a return distribution (arXiv 1707.06887, eq. 7).

    Arguments are those of `bootstrapped_return`.
    """
    _same_shape("bootstrapped_atoms", reward=columns["reward"], first_next_atom=next_atoms[..., 0])
    factor = columns.get("discount", discount.unsqueeze(-1)).unsqueeze(-1)
    return td_target(columns["reward"].unsqueeze(-1), columns["terminated"].unsqueeze(-1), factor, next_atoms)


def categorical_projection(probabilities: Tensor, returns: Tensor, v_min: float, v_max: float) -> Tensor:
    """Project a return distribution onto N evenly spaced atoms in [`v_min`, `v_max`] (arXiv 1707.06887, alg. 1).

    Each of the `returns` [P, B, N] splits its probability between its two neighbouring values, in proportion to its
    nearness; returns outside the support go to the nearest end. The result is the probabilities [P, B, N]. On a GPU the
    order of additions, and so the last bit, is not fixed.
    """
    _same_shape("categorical_projection", probabilities=probabilities, returns=returns)
    atoms = probabilities.shape[-1]
    position = (returns.clamp(v_min, v_max) - v_min) * ((atoms - 1) / (v_max - v_min))
    # Clamp after the conversion to integers, so that NaN too becomes a valid index.
    lower = position.long().clamp_(0, atoms - 2)
    upper_share = probabilities * (position - lower)
    projected = torch.zeros_like(probabilities).scatter_add_(-1, lower, probabilities - upper_share)
    return projected.scatter_add_(-1, lower + 1, upper_share)


# Targets of rollouts


def gae(segment: Segment, discount: Tensor, gae_lambda: Tensor) -> Tensor:
    """Generalised advantage estimates A_t = delta_t + discount lambda A_t+1 [T, P, B] (arXiv 1506.02438, eq. 16).

    delta_t = r_t + discount V(s_t+1) - V(s_t) is the td_error; a truncated step bootstraps like any other. No advantage
    flows back across the end of an episode. `discount` and `gae_lambda` are [P].
    """
    reward, next_value, terminated, ended = _steps(segment)
    error = td_target(reward, terminated, discount.unsqueeze(-1), next_value) - segment.value
    return _accumulated(error, (discount * gae_lambda).unsqueeze(-1) * (~ended))


def clipped_weight(log_ratio: Tensor) -> Tensor:
    """V-trace's rho: the importance weight exp(log_ratio), clipped at 1 (arXiv 1802.01561, section 4.1).

    Its mean over the actions of the behaviour policy is 1 less the total variation distance of the two policies.
    """
    return log_ratio.exp().clamp(max=1)


def v_trace(rho: Tensor, segment: Segment, discount: Tensor, trace: Tensor) -> tuple[Tensor, Tensor]:
    """V-trace value targets and advantages, both [T, P, B] (arXiv 1802.01561, eq. 1 and section 4.2).

    The targets are v_t = V_t + a_t with a_t = rho_t delta_t + discount c_t a_t+1 and the td_error delta_t of `gae`.

    `rho` [T, P, B] are the clipped importance weights of the target policy's actions under the behaviour policy; the
    trace coefficients are c = `trace` rho, with `trace` [P] (remark 2), and `discount` is [P]. Nothing flows back
    across the end of an episode; a truncated step, and the last one, bootstrap from `next_value` alone.

    The advantage of a step is r + discount q - V with q = trace v' + (1 - trace) V', where v' is the target and V' the
    value of the next state; the policy gradient multiplies it by rho. With a `trace` of 1, q is the paper's v'. The
    mixture, as in `vtrace_td_error_and_advantage` of rlax, keeps advantages consistent with targets: on-policy,
    advantages are generalised advantage estimates with lambda = `trace`, and targets are those plus the value.
    """
    reward, next_value, terminated, ended = _steps(segment)
    _same_shape("v_trace", rho=rho, reward=reward)
    factor = discount.unsqueeze(-1)
    decay = (discount * trace).unsqueeze(-1) * rho * (~ended)
    target = _accumulated(rho * (td_target(reward, terminated, factor, next_value) - segment.value), decay)
    target += segment.value
    following = next_value.clone()
    mixed = torch.lerp(next_value[:-1], target[1:], trace.unsqueeze(-1))
    following[:-1] = torch.where(ended[:-1], next_value[:-1], mixed)
    return target, td_target(reward, terminated, factor, following) - segment.value


def _steps(segment: Segment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, next values, and where episodes `terminated` and `ended`, all [T, P, B], of a rollout.

    The next value is V(s_t+1), or `next_value` in the last row and where truncated; after a terminated step it is that
    of the next episode, which no target may use. An invalid step terminates with reward V(s): its td_error is 0.
    """
    _same_shape("segment", **segment._asdict())
    next_value = torch.where(segment.truncated, segment.next_value, segment.value.roll(-1, 0))
    next_value[-1] = segment.next_value[-1]
    terminated = segment.terminated | ~segment.valid
    reward = torch.where(segment.valid, segment.reward, segment.value)
    return reward, next_value, terminated, terminated | segment.truncated


def _accumulated(error: Tensor, decay: Tensor) -> Tensor:
    """The sums x_t = error_t + decay_t x_t+1, all [T, P, B], from the last step backwards."""
    sums = torch.empty_like(error)
    later = torch.zeros_like(error[0])
    for time in range(error.shape[0] - 1, -1, -1):
        later = torch.addcmul(error[time], decay[time], later, out=sums[time])
    return sums


# Metrics


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Non-negative estimate (ratio - 1) - log ratio [P, B] of KL(old || new) (Schulman 2020)."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).expm1() - log_ratio


def clip_fraction(log_ratio: Tensor, clip: Tensor) -> Tensor:
    """1 where the ratio is further than `clip` [P] from 1, else 0; [P, B]."""
    return (log_ratio.expm1().abs() > clip.unsqueeze(-1)).float()


def explained_variance(prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Explained variance [P] of targets [P, B] by predictions [P, B] under the weights [P, B].

    It is 1 for a perfect prediction, 0 for a constant one, and negative for worse ones. For constant targets, of which
    no share can be explained, it is 0.
    """
    _same_shape("explained_variance", prediction=prediction, target=target, weight=weight)
    share = weight / weight.sum(-1, keepdim=True).clamp(min=1e-12)

    def moments(values: Tensor) -> tuple[Tensor, Tensor]:
        mean = (values * share).sum(-1, keepdim=True)
        return mean.squeeze(-1), ((values - mean).square() * share).sum(-1)

    (mean, variance), (_, residual) = moments(target), moments(target - prediction)
    # The mean of equal numbers is off by some units in the last place.
    constant = variance <= 1e-12 + 1e-10 * mean.square()
    return (1 - residual / variance).masked_fill(constant, 0.0)


def _same_shape(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape; the message uses their keyword names."""
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{function}: {name} has the shape {list(tensor.shape)}, and {first} {list(expected.shape)}; "
                "they must be the same"
            )
