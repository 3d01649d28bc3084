"""Proximal policy optimisation, PPO (arXiv 1707.06347): A2C with several epochs over each rollout and a clipped loss.

Axes: P agents, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from evorl.algorithms.a2c import A2C, A2CSettings
from evorl.algorithms.functional import approximate_kl, clip_fraction, clipped_surrogate
from evorl.config.fields import Fraction, HyperparameterRange, Positive, Rate, Size
from evorl.networks.distributions import Likelihood
from evorl.networks.stack import Stack
from evorl.replay.rollouts import parts_of
from evorl.types.batches import Batch, Loss
from evorl.types.tensors import Tensors

KL_MARGIN = 1.5
"""An agent stops learning from a rollout once its KL from the behaviour policy exceeds this multiple of `target_kl`."""


class PPOSettings(A2CSettings):
    name: str = "ppo"
    rollout_steps: Size = 256
    learning_rate: Rate = 3e-4
    gae_lambda: Fraction = 0.95
    normalize_advantage: bool = True
    epochs: Size = 10
    """Passes over each rollout."""
    batch_size: Size = 64
    """Steps in a minibatch of an agent, on each rank; see `split_batches`."""
    clip: Positive = 0.2
    """The distance from 1 at which the ratio of new to old probability is clipped."""
    target_kl: Positive | None = None
    """An agent stops learning from a rollout once its approximate KL divergence from the behaviour policy exceeds 1.5
    times this; null sets no limit."""

    def effective_value(self, name: str, value: float, num_envs: int, *, recurrent: bool) -> float:
        """An agent's hyperparameter as training uses it: `batch_size` is the actual size of minibatches."""
        if name != "batch_size" or value <= 0:
            return super().effective_value(name, value, num_envs, recurrent=recurrent)
        rollout = self.rollout_steps * num_envs
        sequences = rollout // ((self.sequence_length or self.rollout_steps) if recurrent else 1)
        return round(rollout / int(parts_of(rollout, value, sequences)))

    hyperparameters: ClassVar[tuple[str, ...]] = (
        *A2CSettings.hyperparameters,
        "epochs",
        "batch_size",
        "clip",
        "target_kl",
    )
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=1e-4, max=3e-3),
        "entropy_coefficient": HyperparameterRange(min=1e-3, max=3e-2),
        "batch_size": HyperparameterRange(min=32, max=256),
        "clip": HyperparameterRange(min=0.1, max=0.4),
    }


class PPO(A2C):
    """A2C with the clipped surrogate instead of the policy gradient."""

    Settings = PPOSettings
    report_every = 7
    metrics = (*A2C.metrics, "approx_kl", "clip_fraction")

    def loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Actor-critic loss of a minibatch, with the KL limit of early stopping if `target_kl` is set."""
        loss, limit = super().loss(stack, batch, generator), stack.hyperparameters.get("target_kl")
        if limit is not None:
            loss.divergence, loss.limit = "approx_kl", KL_MARGIN * limit
        return loss

    def policy_loss(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensor:
        """Clipped surrogate loss [P, B]."""
        log_ratio = likelihood.log_prob - batch.columns["log_prob"]
        return clipped_surrogate(log_ratio, batch.columns["advantage"], stack.hyperparameters["clip"])

    def more_metrics(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensors:
        """The approximate KL from the behaviour policy and whether the ratio is clipped, each [P, B]."""
        log_ratio = likelihood.log_prob - batch.columns["log_prob"]
        fraction = clip_fraction(log_ratio, stack.hyperparameters["clip"])
        return {"approx_kl": approximate_kl(log_ratio), "clip_fraction": fraction}
