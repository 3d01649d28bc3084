"""Advantage actor-critic, A2C (arXiv 1602.01783, with synchronous workers): the base class of the actor-critics.

Axes: P agents, E environments, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor
from torch.nn import functional

from evorl.algorithms.base import ActInput, ActOutput, Algorithm
from evorl.algorithms.functional import explained_variance, gae, policy_gradient
from evorl.config import Config
from evorl.distributed import Placement
from evorl.envs.spaces import EnvSpec, known_kind, wrong_actions
from evorl.networks.distributions import BOX_DISTRIBUTIONS, DISTRIBUTIONS, Distribution, Likelihood
from evorl.networks.stack import Stack, TargetRule
from evorl.replay import Experience
from evorl.replay.rollouts import RolloutExperience, check_rollout
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent, Branches, Head
from evorl.types.batches import Batch, Loss, RecurrentInput, Segment
from evorl.types.outcomes import UserError
from evorl.types.tensors import Observation, Tensors


class A2C(Algorithm):
    """Advantage actor-critic for a stack of agents, with one update for each on-policy rollout."""

    is_actor_critic = True
    metrics: tuple[str, ...] = ("policy_loss", "value_loss", "entropy", "explained_variance")
    target_rule: TargetRule | None = None
    """Update rule of the target network, for losses that need one."""

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        self.distribution = self._distribution()
        heads = (*self.distribution.heads, Head("value", 1))
        branches: Branches = "all" if self.settings.critic == "separate" else "shared"
        policy = self.network(interface.parts, heads, branches, self.target_rule, unread=self._unread(heads))
        self.networks = {"policy": policy}
        self.objectives = [self.objective("policy", self.loss, self.learning_rate)]
        length = self.settings.sequence_length or self.settings.rollout_steps
        self._sequence: int = length if policy.architecture.recurrent else 1
        self.check_copies(1)

    def _unread(self, heads: Sequence[Head]) -> dict[str, set[str]]:
        """The parts of the observation that the policy, or the value, does not read, by head. Raises UserError."""
        parts = self.interface.parts.keys()
        hidden = {name: parts - self.policy_parts.keys() for name in (head.name for head in heads if head.computed)}
        hidden["value"] = parts - self.critic_parts.keys()
        if any(hidden.values()) and self.settings.critic == "shared":
            raise UserError(
                "network.policy_parts, network.critic_parts: with algorithm.critic=shared both read the same; use "
                "separate"
            )
        return {name: names for name, names in hidden.items() if names}

    def _distribution(self) -> Distribution:
        """The action distribution. Raises UserError if the action space is not supported."""
        interface, space, distribution = self.interface, self.interface.action, self.settings.distribution
        kind = known_kind(space, DISTRIBUTIONS)
        if kind is None:
            spaces = ", ".join(sorted(space.__name__ for space in DISTRIBUTIONS))
            raise wrong_actions(self.settings.name, interface, spaces)
        if distribution == "squashed" and not (isinstance(space, gym.spaces.Box) and space.is_bounded()):
            raise UserError(
                f"algorithm.distribution: squashed is for a Box between bounds, and {interface.environment} has "
                f"{space}; leave it out"
            )
        if kind is gym.spaces.Box:
            return BOX_DISTRIBUTIONS[distribution](space, self.settings.initial_log_std)
        return DISTRIBUTIONS[kind](space)

    def check_copies(self, copies: int) -> None:
        """Raise UserError if a rollout cannot be cut into sequences and minibatches over that many ranks."""
        settings, batch_size = self.settings, self.settings.first_hyperparameters().get("batch_size")
        shared = copies if settings.split_batches else 1
        check_rollout(settings.rollout_steps, self.config.environment.num_envs, self._sequence, batch_size, shared)

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        return RolloutExperience(
            self.config,
            self.interface.parts,
            self.targets,
            sequence=self._sequence,
            normalized=self.normalized_parts,
            copies=placement.copies if self.settings.split_batches else 1,
            discount=self.discount,
            gather=placement.gather_copies,
            rank=placement.ranks.rank,
            device=placement.ranks.device,
            stopwatch=stopwatch,
        )

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Sample actions, or take the mode if `deterministic`.

        The extra `unclipped_action` is the sample before it is mapped into the environment's bounds.
        """
        outputs, state = stack.networks["policy"].forward_recurrent(inputs.observation, inputs.recurrent)
        mask, distribution = inputs.action_mask, self.distribution
        if inputs.deterministic:
            return ActOutput(distribution.to_environment(distribution.mode(outputs, mask)), recurrent_state=state)
        action = distribution.sample(outputs, mask, inputs.generator)
        extras = {
            "unclipped_action": action,
            "log_prob": distribution.log_prob(outputs, mask, action),
            "value": outputs["value"].squeeze(-1),
        }
        return ActOutput(distribution.to_environment(action), extras, state)

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        return stack.networks["policy"](observation, recurrent)["value"].squeeze(-1)

    def targets(self, segment: Segment, hyperparameters: Mapping[str, Tensor]) -> Tensors:
        """Generalised advantage estimates and returns [T, P, E] of a rollout, by the agents' hyperparameters [P]."""
        advantage = gae(segment, self.discount(hyperparameters["gamma"]), hyperparameters["gae_lambda"])
        return {"advantage": advantage, "return": advantage + segment.value}

    def adopt(self, agent: Agent, origin: Any) -> Agent:
        """Restart the count of steps, since an annealing schedule spans one run and a branch may begin one."""
        agent.state.acting["steps"] = 0.0
        return super().adopt(agent, origin)

    def learning_rate(self, stack: Stack) -> Tensor:
        """The current learning rate [P], annealed linearly to 0 if that is configured."""
        rate = stack.hyperparameters["learning_rate"]
        if not self.settings.annealing:
            return rate
        return rate * (1 - stack.state["steps"] / self.config.training.max_steps).clamp(min=0)

    def loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Actor-critic loss of a batch: policy loss + c_value * value loss - c_entropy * entropy."""
        outputs = stack.networks["policy"](batch.observation, batch.recurrent)
        mask = batch.observation.get("action_mask")
        likelihood = self.distribution.likelihood(outputs, mask, batch.columns["unclipped_action"])
        value = outputs["value"].squeeze(-1)
        batch = self.with_targets(stack, batch, likelihood, value)
        policy_loss = self.policy_loss(stack, batch, likelihood)
        value_loss = 0.5 * functional.mse_loss(value, batch.columns["return"], reduction="none")
        c_value = stack.hyperparameters["value_coefficient"].unsqueeze(-1)
        c_entropy = self.entropy_coefficient(stack, batch)
        per_sample = policy_loss + c_value * value_loss - c_entropy * likelihood.entropy

        def metrics() -> Tensors:
            explained = explained_variance(batch.columns["value"], batch.columns["return"], batch.weight)
            return {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": likelihood.entropy,
                "explained_variance": explained.unsqueeze(-1).expand_as(policy_loss),
            } | self.more_metrics(stack, batch, likelihood)

        return Loss(per_sample, metrics)

    def with_targets(self, stack: Stack, batch: Batch, likelihood: Likelihood, value: Tensor) -> Batch:
        """Add the columns `advantage` and `return` [P, B], and a newer `value` where that is known, to a batch.

        Rollouts made here already have them.
        """
        return batch

    def entropy_coefficient(self, stack: Stack, batch: Batch) -> Tensor:
        """Coefficient [P, 1], or [P, B], of the entropy."""
        return stack.hyperparameters["entropy_coefficient"].unsqueeze(-1)

    def policy_loss(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensor:
        """Policy-gradient loss [P, B]."""
        return policy_gradient(likelihood.log_prob, batch.columns["advantage"])

    def more_metrics(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensors:
        """Further metrics, each [P, B]."""
        return {}
