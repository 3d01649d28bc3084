"""IMPALA (arXiv 1802.01561), and APPO, its proximal variant.

IMPALA is A2C on off-policy rollouts of actors that lag behind, corrected by V-trace. APPO is PPO's clipped surrogate on
V-trace advantages of a target network, the method of IMPACT (arXiv 1912.00167).

Axes: T steps of a rollout, P agents, S sequences, B = T * S steps of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from evorl.algorithms.a3c import Asynchronous, AsynchronousSettings, in_batch, in_time
from evorl.algorithms.functional import (
    LossAndGradient,
    approximate_kl,
    clip_fraction,
    clipped_surrogate,
    impact_log_ratio,
    next_values,
    v_trace,
    without_gaps,
)
from evorl.config.fields import HyperparameterRange, Positive, Size
from evorl.distributed import Placement
from evorl.networks.distributions import Likelihood
from evorl.networks.stack import Periodic, Stack
from evorl.replay.received import ReceivedSettings
from evorl.types import Batch, Tensors


class IMPALASettings(AsynchronousSettings):
    name: str = "impala"
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    rho_clip: Positive = 1.0
    """The importance weight at which the errors of values, and with them the policy's gradient, are cut."""
    c_clip: Positive = 1.0
    """The same for what flows back from later steps; `gae_lambda` is the factor before it."""
    replayed_rollouts: Annotated[int, Field(ge=0, le=4096)] = 0
    """Older rollouts in each batch beside its `rollouts` new ones: drawn evenly, on each rank from its own."""
    kept_rollouts: Size = 64
    """The number of last rollouts of a generation from which those are drawn."""

    hyperparameters: ClassVar[tuple[str, ...]] = (*AsynchronousSettings.hyperparameters, "rho_clip", "c_clip")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=1e-4, max=1e-2),
        "entropy_coefficient": HyperparameterRange(min=1e-3, max=3e-2),
    }


class IMPALA(Asynchronous):
    """A2C with V-trace advantages and value targets, computed with the current parameters."""

    Settings = IMPALASettings
    metrics: tuple[str, ...] = (*Asynchronous.metrics, "importance_weight")

    def received_settings(self, placement: Placement) -> ReceivedSettings:
        """Received rollouts, and older ones that are replayed beside them."""
        settings: IMPALASettings = self.settings
        return replace(
            super().received_settings(placement),
            replayed=settings.replayed_rollouts,
            kept=settings.kept_rollouts if settings.replayed_rollouts else 0,
            seed=self.config.seed,
            rank=placement.ranks.rank,
        )

    @torch.no_grad()
    def with_targets(self, stack: Stack, batch: Batch, likelihood: Likelihood, value: Tensor) -> Batch:
        """Add V-trace's `advantage`, `return` and `log_ratio` as columns [P, B]."""
        hparams, steps = stack.hyperparameters, self.settings.rollout_steps
        log_prob, value = self.targets_of(stack, batch, likelihood, value)
        log_ratio = log_prob - batch.columns["log_prob"]
        columns = {**batch.columns, "value": value.detach(), "log_ratio": log_ratio}
        names = ("reward", "value", "terminated", "truncated", "valid")
        in_rows = {name: in_time(columns[name], steps) for name in (*names, "next_value", "log_ratio")}
        reward, terminated, ended = without_gaps(*(in_rows[name] for name in names))
        target, advantage = v_trace(
            in_rows["log_ratio"],
            reward,
            in_rows["value"],
            next_values(in_rows["value"], in_rows["next_value"], in_rows["truncated"]),
            terminated,
            ended,
            hparams["gamma"],
            hparams["gae_lambda"],
            hparams["rho_clip"],
            hparams["c_clip"],
        )
        targets = {"advantage": in_batch(advantage), "return": in_batch(target), "log_ratio": log_ratio}
        return self.with_columns(batch, targets)

    def targets_of(self, stack: Stack, batch: Batch, likelihood: Likelihood, value: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the actions and the values, both [P, B], of V-trace's target policy."""
        return likelihood.log_prob.detach(), value

    def more_metrics(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensors:
        """The importance weight [P, B] of each action, which is 1 for on-policy actions."""
        return {"importance_weight": batch.columns["log_ratio"].exp()}


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

    Settings = APPOSettings
    metrics = (*IMPALA.metrics, "approx_kl", "clip_fraction")
    target_rule = Periodic("target_period")

    def targets_of(self, stack: Stack, batch: Batch, likelihood: Likelihood, value: Tensor) -> tuple[Tensor, Tensor]:
        """The target network's log-probabilities of the actions and its values, both [P, B].

        Online values, once fitted to a batch in earlier epochs, would leave no advantages in later ones.
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
        """The approximate KL from the behaviour policy and whether the ratio is clipped, each [P, B]."""
        return super().more_metrics(stack, batch, likelihood) | {
            "approx_kl": approximate_kl(likelihood.log_prob - batch.columns["log_prob"]),
            "clip_fraction": clip_fraction(self.log_ratio(batch, likelihood), stack.hyperparameters["clip"]),
        }
