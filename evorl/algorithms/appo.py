"""Asynchronous proximal policy optimisation, APPO: PPO's clipped surrogate on V-trace advantages of a target network.

The method is that of IMPACT (arXiv 1912.00167). Axes: P agents, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from evorl.algorithms.functional import (
    LossAndGradient,
    approximate_kl,
    clip_fraction,
    clipped_surrogate,
    impact_log_ratio,
)
from evorl.algorithms.impala import IMPALA, IMPALASettings
from evorl.config.fields import HyperparameterRange, Positive, Size
from evorl.networks.distributions import Likelihood
from evorl.networks.stack import Periodic, Stack
from evorl.types import Batch, Tensors


class APPOSettings(IMPALASettings):
    name: str = "appo"
    passes: Annotated[int, Field(ge=1, le=1024)] = 2
    target_period: Size = 4
    """Updates from one copy of the network to the target network to the next."""
    clip: Positive = 0.2
    """The distance from 1 at which the ratio of the new probability to that of the target network is clipped."""

    hyperparameters: ClassVar[tuple[str, ...]] = (*IMPALASettings.hyperparameters, "target_period", "clip")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        **IMPALASettings.ranges,
        "clip": HyperparameterRange(min=0.1, max=0.4),
    }


class APPO(IMPALA):
    """IMPALA with V-trace towards a target network, near which the clipped surrogate keeps the policy."""

    metrics = (*IMPALA.metrics, "approx_kl", "clip_fraction")
    target_rule = Periodic("target_period")

    def targets_of(self, stack: Stack, batch: Batch, likelihood: Likelihood, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target network's log-probabilities of the actions and its values, both [P, B].

        Online values, once fitted to a batch in earlier passes, would leave no advantages in later ones.
        """
        outputs = stack.targets["policy"](batch.observation, batch.recurrent)
        mask = batch.observation.get("action_mask")
        log_prob = self.distribution.log_prob(outputs, mask, batch.columns["unclipped_action"])
        return log_prob, outputs["value"].squeeze(-1)

    def policy_loss(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> LossAndGradient:
        """Clipped surrogate loss and its derivative with respect to the log-probability, both [P, B]."""
        return clipped_surrogate(
            self.log_ratio(batch, likelihood), batch.columns["advantage"], stack.hyperparameters["clip"]
        )

    def log_ratio(self, batch: Batch, likelihood: Likelihood) -> Tensor:
        """Log-ratio [P, B] of the surrogate, from the columns `log_prob` of the worker and `log_ratio` of V-trace."""
        return impact_log_ratio(likelihood.log_prob, batch.columns["log_prob"], batch.columns["log_ratio"])

    @torch.no_grad()
    def more_metrics(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensors:
        """Return the approximate KL from the behaviour policy and whether the ratio is clipped, each [P, B]."""
        return super().more_metrics(stack, batch, likelihood) | {
            "approx_kl": approximate_kl(likelihood.log_prob - batch.columns["log_prob"]),
            "clip_fraction": clip_fraction(self.log_ratio(batch, likelihood), stack.hyperparameters["clip"]),
        }
