"""Distributions over actions, as heads of a network put them out. Axes: P agents, B batch, A action numbers, K choices.

A distribution samples unclipped actions, and log-probabilities are theirs; `to_environment` clips and shapes them for
the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from evorl.types import Head, Tensors

FORBIDDEN = -1e8
"""The logit of a forbidden action: its probability is 0, and 0 times it is not NaN."""


LOG_SCALES = (-5.0, 2.0)
"""The bounds of a squashed Gaussian's log-scale; the authors' code has -20, where a density has no digits left."""
NORMAL_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
"""That of a normal distribution whose scale is 1."""
QUADRATURE = 16
"""The nodes of a squashed Gaussian's entropy, which is right to 2e-5 up to a scale of 1 and to 0.25 at the largest."""


class Likelihood(NamedTuple):
    """Log-probability and entropy, both [P, B], and their gradients by what the heads put out.

    `gradients` takes the gradients [P, B] of a sum by these two, and returns those by each head's output. That takes
    half the time of autograd, for which the operations of small networks are too short.
    """

    log_prob: Tensor
    entropy: Tensor
    gradients: Callable[[Tensor, Tensor], Tensors]


class Distribution(Protocol):
    """A family of distributions; `outputs` are what its `heads` put out, `mask` [P, B, A] the allowed actions."""

    @property
    def heads(self) -> tuple[Head, ...]:
        """Return the heads that a network must have."""

    def sample(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Sample unclipped actions [P, B, ...]."""

    def mode(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        """Return the most likely unclipped actions [P, B, ...]."""

    def log_prob(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Tensor:
        """Return the log-probability [P, B] of unclipped actions [P, B, ...], which is all that acting needs."""

    def likelihood(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Likelihood:
        """Return the log-probability and the entropy of unclipped actions [P, B, ...]."""

    def to_environment(self, unclipped_action: Tensor) -> Tensor:
        """Return the environment's actions [P, B, ...], counted from 0 where they are choices."""


class Categorical:
    """One action of several, or independent choices, each from its own number (`sizes`), with logits side by side."""

    def __init__(self, sizes: tuple[int, ...], shape: tuple[int, ...] = ()) -> None:
        self.sizes = sizes
        self.shape = shape
        self.single = not shape
        self.heads = (Head("action", sum(sizes), near_zero=True),)

    def sample(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Sample whole numbers [P, B] or [P, B, K], by the Gumbel-max trick (Gumbel 1954)."""
        logits = self.logits(outputs, mask)
        exponential = torch.empty_like(logits).exponential_(generator=generator)
        return self._best(logits - exponential.log_())

    def mode(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        return self._best(self.logits(outputs, mask))

    def log_prob(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Tensor:
        parts = [
            logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
            for logits, chosen in self._choices(outputs, mask, unclipped_action)
        ]
        return reduce(torch.add, parts)

    def likelihood(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Likelihood:
        parts = [_choice(logits, chosen) for logits, chosen in self._choices(outputs, mask, unclipped_action)]

        def gradients(by_log_prob: Tensor, by_entropy: Tensor) -> Tensors:
            each = [part.gradients(by_log_prob, by_entropy)["action"] for part in parts]
            found = each[0] if self.single else torch.cat(each, -1)
            return {"action": found if mask is None else found.masked_fill_(~mask, 0.0)}

        log_prob = reduce(torch.add, [part.log_prob for part in parts])
        return Likelihood(log_prob, reduce(torch.add, [part.entropy for part in parts]), gradients)

    def to_environment(self, unclipped_action: Tensor) -> Tensor:
        return unclipped_action if self.single else unclipped_action.view(*unclipped_action.shape[:-1], *self.shape)

    def logits(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        logits = outputs["action"]
        return logits if mask is None else logits.masked_fill(~mask, FORBIDDEN)

    def _choices(
        self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield the logits [P, B, K] of each choice, and what was chosen [P, B, 1]."""
        logits = self.logits(outputs, mask)
        if self.single:
            return [(logits, unclipped_action.unsqueeze(-1))]
        return zip(logits.split(self.sizes, -1), unclipped_action.split(1, -1), strict=True)

    def _best(self, scores: Tensor) -> Tensor:
        if self.single:
            return scores.argmax(-1)
        return torch.stack([part.argmax(-1) for part in scores.split(self.sizes, -1)], -1)


def _choice(logits: Tensor, chosen: Tensor) -> Likelihood:
    """Return the likelihood of one choice among the last axis of `logits`."""
    logs = logits.log_softmax(-1)
    probability = logs.exp()
    entropy = -(probability * logs).sum(-1, keepdim=True)

    def gradients(by_log_prob: Tensor, by_entropy: Tensor) -> Tensors:
        chosen_one = by_log_prob.unsqueeze(-1)
        found = torch.addcmul(chosen_one, by_entropy.unsqueeze(-1), logs + entropy).mul_(probability).neg_()
        return {"action": found.scatter_add_(-1, chosen, chosen_one)}

    return Likelihood(logs.gather(-1, chosen).squeeze(-1), entropy.squeeze(-1), gradients)


class ActionBounds:
    """The bounds of a Box. Where a dimension has two, -1 and 1 stand for them; others are as they are."""

    def __init__(self, space: gym.Space[Any]) -> None:
        """Raises TypeError for a space that is no Box."""
        if not isinstance(space, gym.spaces.Box):
            raise TypeError(f"{space} has no bounds")
        self.shape = space.shape
        below, above = space.bounded_below.ravel(), space.bounded_above.ravel()
        low = np.where(below, space.low.ravel().astype(np.float64), -np.inf)
        high = np.where(above, space.high.ravel().astype(np.float64), np.inf)
        both = below & above
        with np.errstate(invalid="ignore"):
            # Halved before they are added: the sum of large bounds overflows.
            centre, scale = np.where(both, low / 2 + high / 2, 0.0), np.where(both, high / 2 - low / 2, 1.0)
        self._centre, self._scale, self._low, self._high = (
            torch.from_numpy(values.astype(np.float32)) for values in (centre, scale, low, high)
        )

    def to_environment(self, action: Tensor) -> Tensor:
        """Return the environment's actions [P, B, ...] for actions [P, B, A]; what lies beyond a bound is the bound."""
        bounds = self._centre, self._scale, self._low, self._high
        centre, scale, low, high = (value.to(action) for value in bounds)
        return (centre + scale * action).clamp(low, high).view(*action.shape[:-1], *self.shape)

    def from_environment(self, action: Tensor) -> Tensor:
        """Return actions [P, B, A] for the environment's [P, B, ...]."""
        centre, scale = self._centre.to(action), self._scale.to(action)
        # What has only one value is 0, whatever it is divided by.
        return (action.reshape(*action.shape[:2], -1) - centre) / scale.where(scale > 0, 1.0)


class Gaussian:
    """Independent normal distributions with learned means, and a learned scale that is the same in every state.

    Unclipped actions are unbounded. Where a dimension has two bounds, -1 and 1 stand for them; what lies beyond a bound
    acts as the bound. Only the environment sees clipped actions: densities are those of unclipped ones, so they are
    exact.
    """

    def __init__(self, space: gym.spaces.Box) -> None:
        self._bounds = ActionBounds(space)
        size = math.prod(space.shape)
        self.heads = (Head("action", size, near_zero=True), Head("log_scale", size, constant=True))

    def sample(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        mean = outputs["action"]
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return mean + outputs["log_scale"].exp() * noise

    def mode(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        return outputs["action"]

    def log_prob(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Tensor:
        log_scale = outputs["log_scale"]
        return _normal_log_prob((unclipped_action - outputs["action"]) * (-log_scale).exp(), log_scale).sum(-1)

    def likelihood(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Likelihood:
        log_scale, shrink = outputs["log_scale"], (-outputs["log_scale"]).exp()
        z = (unclipped_action - outputs["action"]) * shrink
        log_prob = _normal_log_prob(z, log_scale).sum(-1)
        entropy = (log_scale + NORMAL_ENTROPY).sum(-1)

        def gradients(by_log_prob: Tensor, by_entropy: Tensor) -> Tensors:
            by_mean, by_scale = _normal_gradients(z, shrink, by_log_prob)
            by_scale += by_entropy.unsqueeze(-1)
            return {"action": by_mean, "log_scale": by_scale.sum_to_size(log_scale.shape)}

        return Likelihood(log_prob, entropy.expand_as(log_prob), gradients)

    def to_environment(self, unclipped_action: Tensor) -> Tensor:
        return self._bounds.to_environment(unclipped_action)


class SquashedGaussian:
    """The tanh of independent normals whose means and scales depend on the state (arXiv 1801.01290, appendix C).

    Unclipped actions are those before the tanh; log-probabilities are densities of actions between -1 and 1. Samples
    pass gradients to the outputs. The entropy, which has no closed form, is a Gauss-Hermite quadrature.

    Log-scales are clamped to `LOG_SCALES`. A gradient that leads a log-scale back between these bounds is kept, or a
    network that puts out too low a scale could never raise it again.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.bounds = ActionBounds(space)
        nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE)
        self._nodes = torch.from_numpy(nodes.astype(np.float32))
        self._weights = torch.from_numpy((weights / weights.sum()).astype(np.float32))
        self.size = math.prod(self.bounds.shape)
        self.heads = (Head("action", self.size, near_zero=True), Head("log_scale", self.size, near_zero=True))

    def bounded(self, outputs: Tensors) -> Tensors:
        """Return the outputs with their log-scales between the bounds.

        Whoever differentiates a function of both `sample` and `log_prob` gives them these. It is the sum of both
        gradients that has to lead back, not each by itself.
        """
        return {**outputs, "log_scale": _Clamped.apply(outputs["log_scale"], *LOG_SCALES)}

    def sample(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Sample unclipped actions [P, B, A]."""
        mean = outputs["action"]
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return torch.addcmul(mean, self._log_scale(outputs).exp(), noise)

    def mode(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        """Return the mean, the most likely before the tanh."""
        return outputs["action"]

    def log_prob(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Tensor:
        """Return the log-density [P, B] of the tanh of unclipped actions [P, B, A]."""
        log_scale = self._log_scale(outputs)
        z = (unclipped_action - outputs["action"]) * (-log_scale).exp()
        return (_normal_log_prob(z, log_scale) - _log_slope(unclipped_action)).sum(-1)

    def likelihood(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Likelihood:
        """Return the same and the entropy [P, B]: that before the tanh, and the mean of the logarithm of its slope."""
        mean, log_scale = outputs["action"], self.bounded(outputs)["log_scale"]
        nodes, weights, shrink = self._nodes.to(mean), self._weights.to(mean), (-log_scale).exp()
        z = (unclipped_action - mean) * shrink
        log_prob = (_normal_log_prob(z, log_scale) - _log_slope(unclipped_action)).sum(-1)
        offsets = log_scale.exp().unsqueeze(-1) * nodes
        entropy = log_scale + NORMAL_ENTROPY + _log_slope(mean.unsqueeze(-1) + offsets) @ weights

        def gradients(by_log_prob: Tensor, by_entropy: Tensor) -> Tensors:
            by_mean, by_scale = _normal_gradients(z, shrink, by_log_prob)
            slope = -2 * torch.tanh(mean.unsqueeze(-1) + offsets)
            by_entropy = by_entropy.unsqueeze(-1)
            by_mean += by_entropy * (slope @ weights)
            by_scale += by_entropy * (1 + (slope * offsets) @ weights)
            away = _leads_away(outputs["log_scale"], by_scale, *LOG_SCALES)
            return {"action": by_mean, "log_scale": by_scale.masked_fill_(away, 0.0)}

        return Likelihood(log_prob, entropy.sum(-1), gradients)

    def to_environment(self, unclipped_action: Tensor) -> Tensor:
        return self.bounds.to_environment(torch.tanh(unclipped_action))

    @staticmethod
    def _log_scale(outputs: Tensors) -> Tensor:
        return outputs["log_scale"].clamp(*LOG_SCALES)


class _Clamped(torch.autograd.Function):
    """Clamp values to bounds; the gradient stays what it is but where it leads away from the bounds.

    This is `gradient="identity_if_towards"` of the bounds in TensorFlow Compression.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(values)
        ctx.bounds = low, high
        return values.clamp(low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (values,) = ctx.saved_tensors
        return gradient.masked_fill(_leads_away(values, gradient, *ctx.bounds), 0.0), None, None


def _leads_away(values: Tensor, gradient: Tensor, low: float, high: float) -> Tensor:
    """Tell where values lie beyond a bound and a step against their gradient would lead further."""
    return ((values < low) & (gradient > 0)) | ((values > high) & (gradient < 0))


def _normal_log_prob(z: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log-density of a normal distribution at `z` scales from its mean, of the shape of `z`."""
    return -0.5 * z.square() - log_scale - 0.5 * math.log(2 * math.pi)


def _normal_gradients(z: Tensor, shrink: Tensor, by_log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients [P, B, A] by the mean and the log-scale; `shrink` is one over the scale."""
    each = by_log_prob.unsqueeze(-1)
    return each * z * shrink, each * (z.square() - 1)


def _log_slope(unclipped_action: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), of the shape of u, which has digits left where tanh(u) rounds to 1."""
    return 2 * (math.log(2) - unclipped_action - functional.softplus(-2 * unclipped_action))


DISTRIBUTIONS: Mapping[type, Callable[[Any], Distribution]] = {
    gym.spaces.Discrete: lambda space: Categorical((int(space.n),)),
    gym.spaces.MultiDiscrete: lambda space: Categorical(tuple(map(int, space.nvec.flatten())), space.shape),
    gym.spaces.Box: Gaussian,
}
"""The distribution for each kind of action space."""

BOX_DISTRIBUTIONS: Mapping[str, Callable[[Any], Distribution]] = {"gaussian": Gaussian, "squashed": SquashedGaussian}
"""Those of a Box, by the name that a configuration gives; a squashed one needs bounds."""
