"""IMPALA (arXiv 1802.01561), and APPO, its proximal variant.

IMPALA is A2C on off-policy rollouts of actors that lag behind, corrected by V-trace. APPO is PPO's clipped surrogate on
V-trace advantages of a target network, the method of IMPACT (arXiv 1912.00167).

Axes: T steps of a rollout, P agents, S sequences, B = T * S steps of a batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evorl.algorithms.asynchronous import Asynchronous, flattened
from evorl.algorithms.functional import clipped_weight, impact_log_ratio, v_trace
from evorl.algorithms.ppo import PPO
from evorl.config import Config
from evorl.config.actor_critic import APPOSettings
from evorl.envs.spaces import EnvSpec
from evorl.networks.distributions import Likelihood
from evorl.networks.stack import Periodic, Stack
from evorl.types.agents import Agent
from evorl.types.batches import Batch
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors


class IMPALA(Asynchronous):
    """A2C with V-trace advantages and value targets, computed with the current parameters."""

    metrics: tuple[str, ...] = (*Asynchronous.metrics, "importance_weight")

    @torch.no_grad()
    def with_targets(self, stack: Stack, batch: Batch, likelihood: Likelihood, value: Tensor) -> Batch:
        """Add V-trace's targets, and the values from which they are computed, as columns [P, B]."""
        targets = self.v_trace_targets(stack, batch, likelihood.log_prob.detach(), value)
        return replace(batch, columns={**batch.columns, **targets})

    def v_trace_targets(self, stack: Stack, batch: Batch, log_prob: Tensor, value: Tensor) -> Tensors:
        """V-trace's `advantage` times rho, `return`, `value` and `log_ratio`, each [P, B].

        `log_prob` and `value` [P, B] are those of V-trace's target policy. Advantages are normalised over the batch if
        that is configured, before they are weighted: the mean of weighted ones would be a baseline without weights.
        """
        hparams, value = stack.hyperparameters, value.detach()
        log_ratio = log_prob - batch.columns["log_prob"]
        rho, segment = clipped_weight(log_ratio), self.segment({**batch.columns, "value": value})
        target, advantage = v_trace(self.in_time(rho), segment, hparams["gamma"], hparams["gae_lambda"])
        return {
            "advantage": rho * self.normalized_advantage(flattened(advantage), batch),
            "return": flattened(target),
            "value": value,
            "log_ratio": log_ratio,
        }

    def more_metrics(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensors:
        """The clipped importance weight [P, B] of each action: how much of it V-trace keeps."""
        return {"importance_weight": clipped_weight(batch.columns["log_ratio"])}


class APPO(PPO, IMPALA):
    """IMPALA with PPO's loss: a target network is V-trace's target policy, and the surrogate keeps the policy close."""

    report_every = 1
    metrics = (*IMPALA.metrics, "approx_kl", "clip_fraction")

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        settings: APPOSettings = config.algorithm
        self.target_rule = Periodic("target_period", times=settings.passes * settings.minibatches)
        super().__init__(config, interface)

    def check_copies(self, copies: int) -> None:
        """Raise UserError if a batch cannot be cut into so many minibatches."""
        settings: APPOSettings = self.settings
        parts = settings.minibatches
        rollouts = settings.rollouts * self.config.environment.num_envs
        unit, sequences = "steps", rollouts * settings.rollout_steps
        if self.networks["policy"].architecture.recurrent:
            unit, sequences = "rollouts of an environment", rollouts
        if parts > sequences:
            raise UserError(
                f"algorithm.minibatches: a batch has {sequences} {unit} on each rank, fewer than {parts} minibatches; "
                f"use at most {sequences}"
            )

    def adopt(self, agent: Agent, origin: Any) -> Agent:
        """Round the update count up to whole batches, since the target network is copied only after a whole batch."""
        updates = agent.state.updates["policy"]
        agent.state.updates["policy"] = updates + -updates % (self.settings.passes * self.settings.minibatches)
        return super().adopt(agent, origin)

    def batch_targets(self, stack: Stack, batch: Batch) -> Tensors:
        """V-trace targets [P, B] with the target network as target policy and value function.

        Online values, once fitted to a batch in earlier passes, would leave no advantages in later ones.
        """
        outputs = stack.target_networks["policy"](batch.observation, batch.recurrent)
        mask = batch.observation.get("action_mask")
        log_prob = self.distribution.log_prob(outputs, mask, batch.columns["unclipped_action"])
        return self.v_trace_targets(stack, batch, log_prob, outputs["value"].squeeze(-1))

    def with_targets(self, stack: Stack, batch: Batch, likelihood: Likelihood, value: Tensor) -> Batch:
        return batch

    def log_ratio(self, batch: Batch, likelihood: Likelihood) -> Tensor:
        """Log-ratio [P, B] of the surrogate, from the columns `log_prob` of the worker and `log_ratio` of V-trace."""
        return impact_log_ratio(likelihood.log_prob, batch.columns["log_prob"], batch.columns["log_ratio"])
