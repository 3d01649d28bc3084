"""Soft actor-critic, SAC (arXiv 1801.01290), with a learned temperature (1812.05905).

Discrete actions are supported as well (1910.07207).
Axes: P agents, E environments, B batch, A action dimensions or choices, C critics.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from evorl.algorithms.base import ActInput, ActOutput, Algorithm, hyperparameter
from evorl.algorithms.ddpg import q_values
from evorl.algorithms.exploration import draw_noise, random_at_first, random_choices, random_numbers
from evorl.algorithms.functional import bootstrapped_return, temperature_loss
from evorl.algorithms.off_policy import (
    TWIN_CRITICS,
    OffPolicy,
    actor_learning_rate,
    critic_loss,
)
from evorl.algorithms.state_dependent import NOISE, state_dependent_noise
from evorl.config import Config
from evorl.config.off_policy import SACSettings
from evorl.envs.spaces import EnvSpec, ObservationSpecs, choices, known_kind, with_action, wrong_actions
from evorl.networks.distributions import Categorical, SquashedGaussian
from evorl.networks.stack import Architectures, NetworkSpec, Polyak, Stack, StackedNetwork
from evorl.networks.standard import StandardNetwork
from evorl.types.agents import Agent, Architecture, Head
from evorl.types.batches import Batch, Loss, RecurrentInput
from evorl.types.outcomes import UserError
from evorl.types.tensors import Observation, Tensors

TAKES = "a Box between bounds, Discrete"
"""The supported action spaces, for error messages."""
REACHABLE = 0.98
"""The largest share of the maximum entropy that is taken as a target; the paper's (arXiv 1910.07207)."""


class SAC(OffPolicy):
    """SAC for a stack of agents: an actor, two critics with target networks, and a temperature.

    `ContinuousSAC` and `DiscreteSAC` say what the policy, its entropy and the critics' values are.
    """

    is_actor_critic = True
    metrics = ("td_error", "q_values", "entropy", "temperature")

    @classmethod
    def variant(cls, interface: EnvSpec) -> type[Algorithm]:
        kind = known_kind(interface.action, VARIANTS)
        if kind is None:
            raise wrong_actions("sac", interface, TAKES)
        return VARIANTS[kind]

    def __init__(self, config: Config[SACSettings], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        self.noise = state_dependent_noise(config, interface)
        self.explores_by_noise = self.settings.exploration.noise != "none"

    def set_networks(self, heads: Sequence[Head], reads: ObservationSpecs, outputs: int) -> None:
        """Set the networks from the actor's heads, and the critics' inputs and the number of their outputs."""
        temperature = StandardNetwork({}, [Head("log_temperature", 1, constant=True)], (), "uniform")
        critics = [Head(name, outputs) for name in TWIN_CRITICS]
        self.networks = {
            "actor": self.network(self.policy_parts, heads, "shared"),
            "critics": self.network(reads, critics, "all", Polyak("tau")),
            "temperature": NetworkSpec(temperature, Architecture()),
        }
        rate = hyperparameter("learning_rate")
        self.objectives = [
            self.objective("critics", self.critic_loss, rate),
            self.objective("actor", self.actor_loss, actor_learning_rate),
            self.objective("temperature", self.temperature_loss, rate),
        ]

    def adopt(self, agent: Agent, origin: Any) -> Agent:
        """Keep the temperature and the scales of state-dependent noise, which agents store relative to initial values.

        Both are stored as logarithms, so they shift by the difference between the two runs' settings.
        """
        parameters = agent.tensors["temperature"]["parameters"]
        factor = origin.initial_temperature / self.settings.initial_temperature
        parameters["log_temperature.bias"] = parameters["log_temperature.bias"] + math.log(factor)
        theirs, own = origin.state_dependent_noise, self.settings.state_dependent_noise
        if theirs is not None and own is not None:
            scales = agent.tensors["actor"]["parameters"]
            scales[f"{NOISE}.weight"] = scales[f"{NOISE}.weight"] + (theirs.initial_log_scale - own.initial_log_scale)
        return super().adopt(agent, origin)

    @abstractmethod
    def policy(
        self, stack: Stack, observation: Observation, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Each agent's policy in an observation, as `expected_q` reads it, and its entropy [P, B]."""

    @abstractmethod
    def expected_q(self, critics: StackedNetwork, observation: Observation, policy: Tensor) -> Tensor:
        """The expectation [P, B] under the policy of the minimum over critics of Q(s, a)."""

    @abstractmethod
    def q_of_action(self, critics: StackedNetwork, observation: Observation, action: Tensor) -> Tensor:
        """Critics' values Q(s, a) [C, P, B] of actions [P, B, ...] in the environment's action space."""

    @abstractmethod
    def target_entropy(self, stack: Stack, mask: Tensor | None) -> Tensor:
        """The target entropy [P, 1], or [P, B] if `mask` [P, B, A] forbids actions."""

    def temperature(self, stack: Stack) -> Tensor:
        """The temperature alpha [P, 1] of each agent."""
        return self.log_temperature(stack).exp()

    def log_temperature(self, stack: Stack) -> Tensor:
        """The log-temperature [P, 1] of each agent."""
        log_temperature = stack.networks["temperature"]({})["log_temperature"].squeeze(-1)
        return log_temperature + math.log(self.settings.initial_temperature)

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """State values E[min Q(s, a)] [P, E], without entropy; for a Box, at the policy's mean action."""
        policy, _ = self.policy(stack, observation, None)
        return self.expected_q(stack.networks["critics"], observation, policy)

    def critic_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Squared td_error of the critics from targets with soft next values (1812.05905, eq. 3, 5 and 6)."""
        with torch.no_grad():
            policy, entropy = self.policy(stack, batch.next_observation, generator)
            next_q = self.expected_q(stack.target_networks["critics"], batch.next_observation, policy)
            discount = self.discount(stack.hyperparameters["gamma"])
            target = bootstrapped_return(batch.columns, discount, next_q + self.temperature(stack) * entropy)
        q_values = self.q_of_action(stack.networks["critics"], batch.observation, batch.columns["action"])
        return critic_loss(q_values, target)

    def actor_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Policy loss E[alpha log pi(a|s) - min Q(s, a)] [P, B], the negative soft value (1812.05905, eq. 7)."""
        policy, entropy = self.policy(stack, batch.observation, generator)
        temperature = self.temperature(stack).detach()
        critics = stack.networks["critics"].frozen()
        per_sample = -self.expected_q(critics, batch.observation, policy) - temperature * entropy
        return Loss(
            per_sample,
            lambda: {"entropy": entropy, "temperature": temperature.expand_as(entropy)},
            columns={"entropy": entropy.detach()},
        )

    def temperature_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Temperature loss, which raises the temperature where the entropy of the actor's loss is below its target."""
        target_entropy = self.target_entropy(stack, batch.observation.get("action_mask"))
        return Loss(temperature_loss(self.log_temperature(stack), batch.columns["entropy"], target_entropy))


class ContinuousSAC(SAC):
    """Bounded continuous actions from a squashed Gaussian; an expectation is over one sample.

    With state-dependent noise the Gaussian's scale is that of this noise, and gradients flow through the features that
    it depends on. Actions reuse the noise matrices that environments hold; losses use independent samples.
    """

    def __init__(self, config: Config[SACSettings], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        if "target_entropy_share" in (config.evolution.hyperparameters or {}):
            raise UserError(
                "evolution.hyperparameters.target_entropy_share: has no effect on continuous actions; drop its range, "
                "or set algorithm.target_entropy and evolve that"
            )
        reads = with_action(interface, "sac", self.critic_parts, TAKES)
        self.distribution = SquashedGaussian(interface.action)
        self.bounds = self.distribution.bounds
        self.stored_action = interface.action.shape or (), torch.float32
        heads = self.distribution.heads
        self.set_networks(heads if self.noise is None else (heads[0], *self.noise.heads), reads, 1)

    def noise_shape(self, architectures: Architectures) -> tuple[int, int]:
        if self.noise is not None:
            return self.noise.shape(architectures["actor"])
        return (1, self.bounds.size) if self.settings.exploration.kept else (0, 0)

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Sample actions, with noise if configured, or take the mean before tanh if `deterministic`."""
        outputs, generator = self.outputs(stack, inputs.observation), inputs.generator
        exploration = self.settings.exploration
        if inputs.deterministic:
            return ActOutput(self.distribution.to_environment(self.distribution.mode(outputs, None)))
        if self.noise is not None:
            noise, state = self.noise.draw(outputs, inputs.recurrent, generator)
            action = torch.tanh(self.distribution.moved(outputs, noise))
        else:
            action = torch.tanh(self.distribution.sample(outputs, None, generator))
            noise, state = draw_noise(exploration, action, inputs.recurrent, generator)
            action = (action + noise).clamp(-1.0, 1.0)
        steps = stack.state["steps"]
        action = random_at_first(exploration, action, steps, lambda: random_numbers(action, generator))
        return ActOutput(self.bounds.to_environment(action), recurrent_state=state)

    def outputs(self, stack: Stack, observation: Observation) -> Tensors:
        """The actor's outputs, with the `log_scale` [P, B, A] of state-dependent noise if there is such noise."""
        outputs = stack.networks["actor"](observation)
        return outputs if self.noise is None else self.noise.gaussian(outputs)

    def policy(
        self, stack: Stack, observation: Observation, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """A sampled action [P, B, A] in (-1, 1), or without a generator tanh of the mean, and its -log pi(a|s)."""
        outputs = self.distribution.bounded(self.outputs(stack, observation))
        unclipped = outputs["action"] if generator is None else self.distribution.sample(outputs, None, generator)
        return torch.tanh(unclipped), -self.distribution.log_prob(outputs, None, unclipped)

    def expected_q(self, critics: StackedNetwork, observation: Observation, policy: Tensor) -> Tensor:
        return q_values(critics, observation, policy).amin(0)

    def q_of_action(self, critics: StackedNetwork, observation: Observation, action: Tensor) -> Tensor:
        return q_values(critics, observation, self.bounds.from_environment(action))

    def target_entropy(self, stack: Stack, mask: Tensor | None) -> Tensor:
        hparams = stack.hyperparameters
        if "target_entropy" in hparams:
            return hparams["target_entropy"].unsqueeze(-1)
        return torch.full_like(hparams["gamma"], -self.bounds.size).unsqueeze(-1)


class DiscreteSAC(SAC):
    """Discrete actions (arXiv 1910.07207); an expectation is over all actions, exactly."""

    stored_action = (), torch.int64

    def __init__(self, config: Config[SACSettings], interface: EnvSpec) -> None:
        """Raises UserError if action noise is configured, which discrete actions do not support."""
        super().__init__(config, interface)
        if self.explores_by_noise:
            raise UserError(
                f"algorithm.exploration.noise: {self.settings.exploration.noise} noise is for a Box, and "
                f"{interface.environment} has {interface.action}; leave it out"
            )
        (self.actions,) = choices(interface.action)
        self.distribution = Categorical((self.actions,))
        self.set_networks(self.distribution.heads, self.critic_parts, self.actions)

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Sample actions, or take the most likely ones if `deterministic`."""
        mask, generator = inputs.action_mask, inputs.generator
        outputs = stack.networks["actor"](inputs.observation)
        if inputs.deterministic:
            return ActOutput(self.distribution.mode(outputs, mask))
        action = self.distribution.sample(outputs, mask, generator)
        steps, exploration = stack.state["steps"], self.settings.exploration
        return ActOutput(
            random_at_first(
                exploration, action, steps, lambda: random_choices(self.actions, action.shape, mask, generator)
            )
        )

    def policy(
        self, stack: Stack, observation: Observation, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The probabilities [P, B, A] of all actions."""
        logits = self.distribution.logits(stack.networks["actor"](observation), observation.get("action_mask"))
        log_prob = logits.log_softmax(-1)
        probability = log_prob.exp()
        return probability, -(probability * log_prob).sum(-1)

    def expected_q(self, critics: StackedNetwork, observation: Observation, policy: Tensor) -> Tensor:
        return (policy * torch.stack(list(critics(observation).values())).amin(0)).sum(-1)

    def q_of_action(self, critics: StackedNetwork, observation: Observation, action: Tensor) -> Tensor:
        index = action.unsqueeze(-1)
        return torch.stack([values.gather(-1, index).squeeze(-1) for values in critics(observation).values()])

    def target_entropy(self, stack: Stack, mask: Tensor | None) -> Tensor:
        # Masked actions do not count: a target that no policy can reach would raise the temperature for ever.
        hparams = stack.hyperparameters
        share = hparams["target_entropy_share"].unsqueeze(-1)
        most = share.new_full((), math.log(self.actions)) if mask is None else mask.sum(-1).clamp(min=1).log()
        if "target_entropy" in hparams:
            return torch.minimum(hparams["target_entropy"].unsqueeze(-1), REACHABLE * most)
        return share * most


VARIANTS: Mapping[type, type[SAC]] = {gym.spaces.Box: ContinuousSAC, gym.spaces.Discrete: DiscreteSAC}
