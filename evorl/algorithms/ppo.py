"""Proximal policy optimisation, PPO (arXiv 1707.06347): A2C with several epochs over each rollout and a clipped loss.

Axes: P agents, B batch.
"""

from __future__ import annotations

from torch import Tensor

from evorl.algorithms.a2c import A2C
from evorl.algorithms.functional import approximate_kl, clip_fraction, clipped_surrogate
from evorl.networks.distributions import Likelihood
from evorl.networks.stack import Stack
from evorl.types.batches import Batch
from evorl.types.tensors import Tensors


class PPO(A2C):
    """A2C with the clipped surrogate instead of the policy gradient."""

    report_every = 7
    metrics = (*A2C.metrics, "approx_kl", "clip_fraction")

    def policy_loss(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensor:
        """Clipped surrogate loss [P, B]."""
        log_ratio = self.log_ratio(batch, likelihood)
        return clipped_surrogate(log_ratio, batch.columns["advantage"], stack.hyperparameters["clip"])

    def log_ratio(self, batch: Batch, likelihood: Likelihood) -> Tensor:
        """Log-ratio [P, B] of the surrogate: the log-probability minus that of the behaviour policy."""
        return likelihood.log_prob - batch.columns["log_prob"]

    def more_metrics(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensors:
        """The approximate KL from the behaviour policy and whether the ratio is clipped, each [P, B]."""
        return super().more_metrics(stack, batch, likelihood) | {
            "approx_kl": approximate_kl(likelihood.log_prob - batch.columns["log_prob"]),
            "clip_fraction": clip_fraction(self.log_ratio(batch, likelihood), stack.hyperparameters["clip"]),
        }
