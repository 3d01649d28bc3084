"""Loss functions of values and policies. Pure functions, elementwise.

Axes: P agents, B batch, N atoms of a distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

CACHED = 2**16
"""Number of quantile differences computed at once, chosen to fit in a core's own cache."""


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Return (prediction - target)^2 in the inputs' shape."""
    return (prediction - target).square()


def huber(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the Huber loss in the inputs' shape: half the squared error up to 1, linear beyond (Huber 1964)."""
    return functional.smooth_l1_loss(prediction, target, reduction="none")


class Regression(NamedTuple):
    """A loss of (prediction, target), and its derivative `slope` as a function of (prediction - target)."""

    loss: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


REGRESSION_LOSSES: Mapping[str, Regression] = {
    "mse": Regression(squared_error, lambda error: 2 * error),
    "huber": Regression(huber, lambda error: error.clamp(-1, 1)),
}


def policy_gradient(log_prob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Return the policy-gradient loss -log_prob * advantage and its derivative with respect to log_prob, both [P, B].

    It is REINFORCE with a baseline (Williams 1992).
    """
    slope = -advantage
    return log_prob * slope, slope


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative clipped surrogate of PPO (arXiv 1707.06347, eq. 7) and its derivative, both [P, B].

    The derivative is with respect to `log_ratio` [P, B], the new log-probability minus the old one. `advantage` is
    [P, B], `clip` [P].
    """
    # With limit = 1 + clip for positive advantages and 1 - clip for negative ones, min(ratio * A, clamp(ratio) * A) is
    # min(ratio * A, limit * A), and limit * A is A + clip * |A|: half the operations.
    limit = torch.addcmul(advantage, clip.unsqueeze(-1), advantage.abs())
    surrogate = log_ratio.exp() * advantage
    return -torch.minimum(surrogate, limit), (-surrogate).masked_fill_(surrogate > limit, 0.0)


def value_error(value: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return half the squared error and its derivative with respect to the value, both [P, B]."""
    error = value - target
    return 0.5 * error.square(), error


def clipped_value_error(value: Tensor, old_value: Tensor, target: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped value loss and its derivative with respect to the value, both [P, B].

    The loss is the larger of half the squared error of the value and that of the value clipped to within `clip` [P] of
    the old one. From the authors' implementation of PPO (Dhariwal et al. 2017); compared in arXiv 2006.05990.
    """
    bound, away = clip.unsqueeze(-1), value - old_value
    (free, slope), (near, _) = value_error(value, target), value_error(old_value + away.clamp(-bound, bound), target)
    return torch.maximum(free, near), slope.masked_fill((near > free) & (away.abs() > bound), 0.0)


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Return the non-negative estimate (ratio - 1) - log ratio [P, B] of KL(old || new) (Schulman 2020)."""
    return log_ratio.expm1() - log_ratio


def explained_variance(prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the explained variance [P] of targets [P, B] by predictions [P, B] under the weights [P, B].

    It is 1 for a perfect prediction, 0 for a constant one, and negative for worse ones.
    """
    share = weight / weight.sum(-1, keepdim=True).clamp(min=1e-12)

    def variance(values: Tensor) -> Tensor:
        mean = (values * share).sum(-1, keepdim=True)
        return ((values - mean).square() * share).sum(-1)

    return 1 - variance(target - prediction) / variance(target).clamp(min=1e-12)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy [P, B] between `target` probabilities and the softmax of `logits`, both [P, B, N]."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def quantile_huber(prediction: Tensor, target: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """Return the quantile Huber loss [P, B] of quantiles [P, B, N] for samples [P, B, M] (arXiv 1710.10044, eq. 10).

    Quantile i of N has the level (i + 1/2) / N. The loss is summed over quantiles, averaged over samples and divided by
    `kappa` as in arXiv 1806.06923. With `kappa` 0 it is the quantile regression loss. Also return its derivative
    [P, B, N] with respect to the prediction, which comes from the same N * M differences.
    """
    agents, part, quantiles = prediction.shape
    if prediction.device.type == "cpu":
        part = max(1, CACHED // (agents * quantiles * target.shape[-1]))
    parts = zip(prediction.split(part, 1), target.split(part, 1), strict=True)
    found = [_quantile_huber(*each, kappa) for each in parts]
    loss, slope = (torch.cat(each, 1) for each in zip(*found, strict=True))
    return loss, slope


def _quantile_huber(prediction: Tensor, target: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """Return the loss [P, B] and its derivative [P, B, N] with respect to the prediction."""
    quantiles = prediction.shape[-1]
    levels = ((torch.arange(quantiles).to(prediction) + 0.5) / quantiles).unsqueeze(-1)
    difference = target.unsqueeze(-2) - prediction.unsqueeze(-1)
    share = torch.where(difference < 0, 1 - levels, levels)
    # With d the difference and c = clamp(d, -kappa, kappa), the Huber loss is c (d - c / 2) and its slope c.
    clipped = difference.clamp(-kappa, kappa) if kappa else difference.sign()
    slope, scale = share * clipped, kappa or 1.0
    beyond = torch.sub(difference, clipped, alpha=0.5) if kappa else difference
    return (slope * beyond).mean(-1).sum(-1) / scale, slope.mean(-1) / -scale
