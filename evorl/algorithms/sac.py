"""Soft actor-critic, SAC (arXiv 1801.01290), with a learned temperature (1812.05905).

Discrete actions are supported as well (1910.07207).
Axes: P agents, E environments, B batch, A action dimensions or choices, C critics, K actions of an expectation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor

from evorl.algorithms.base import ActInput, ActOutput, hyperparameter
from evorl.algorithms.exploration import ActionNoise, random_choices, random_numbers
from evorl.algorithms.functional import bootstrapped_return, soft_value, temperature_loss
from evorl.algorithms.off_policy import (
    CRITIC_RANGES,
    TWIN_CRITICS,
    OffPolicy,
    OffPolicySettings,
    actor_learning_rate,
    critic_loss,
)
from evorl.algorithms.state_dependent import (
    StateDependentNoise,
    StateDependentNoiseSettings,
    keep_scales,
    state_dependent_noise,
)
from evorl.config import Config
from evorl.config.fields import Finite, HyperparameterRange, Positive, Rate
from evorl.envs.spaces import ACTION, EnvSpec, ObservationSpecs, choices, known_kind, with_action, wrong_actions
from evorl.networks.distributions import Categorical, SquashedGaussian
from evorl.networks.stack import Architectures, NetworkSpec, Polyak, Stack, StackedNetwork
from evorl.networks.standard import StandardNetwork
from evorl.replay.storage import Field as StoredField
from evorl.types import Agent, Architecture, Batch, Head, Loss, Observation, RecurrentInput, Tensors, UserError

TAKES = "a Box between bounds, Discrete"
"""The supported action spaces, for error messages."""
REACHABLE = 0.98
"""The largest share of the maximum entropy that is taken as a target; the paper's (arXiv 1910.07207)."""


class SACExploration(ActionNoise):
    noise: Literal["none", "gaussian", "ornstein_uhlenbeck"] = "none"
    """Noise added to the policy's samples, for a `Box` only; `ornstein_uhlenbeck` is correlated over steps and so
    explores further."""


class SACSettings(OffPolicySettings):
    name: str = "sac"
    learning_rate: Rate = 3e-4
    """The learning rate of the critics and the temperature."""
    actor_learning_rate: Rate | None = None
    """Null is `learning_rate`."""
    initial_temperature: Positive = 1.0
    """The initial temperature (weight of the entropy), which is then learned."""
    target_entropy: Finite | None = None
    """The target entropy in nats, of actions scaled to [-1, 1]. Null is minus the number of dimensions of a `Box`, and
    for discrete actions `target_entropy_share` of the maximum entropy. With discrete actions a value set here is
    limited to 98 % of that maximum."""
    target_entropy_share: Rate = 0.98
    """The target entropy of discrete actions as a fraction of the maximum, used where `target_entropy` is null. In each
    state the maximum is the logarithm of the number of allowed actions."""
    exploration: SACExploration = SACExploration()
    state_dependent_noise: StateDependentNoiseSettings | None = None
    """Explore with a random function of the state that is redrawn periodically (gSDE, arXiv 2005.05719): the policy's
    variance is that of these draws, and its scale in a state follows from the features of its last hidden layer."""

    hyperparameters: ClassVar[tuple[str, ...]] = (
        *OffPolicySettings.hyperparameters,
        "actor_learning_rate",
        "target_entropy",
        "target_entropy_share",
    )
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = CRITIC_RANGES

    def ineffective(self, name: str) -> str | None:
        replaced = name == "target_entropy_share" and self.target_entropy is not None
        return "because `target_entropy` is set" if replaced else super().ineffective(name)


class Expectation(NamedTuple):
    """An expectation under the policy: over one sampled action (K = 1) or over all K discrete actions.

    `probability` and `log_prob` are [P, B, K]; `action` [P, B, A] is the sample, between -1 and 1.
    """

    probability: Tensor
    log_prob: Tensor
    action: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        """The expectation [P, B] of values [P, B, K]."""
        return (self.probability * values).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy -E[log pi(a|s)] [P, B], as sampled or exact."""
        return -self.of(self.log_prob)


class Actions(ABC):
    """SAC's policy and critics for one kind of action space."""

    heads: tuple[Head, ...]
    """The actor's heads."""
    reads: ObservationSpecs
    """Inputs of the critics: the observation, and a continuous action."""
    values: int
    """The outputs of each critic: one, or one for each choice."""
    stored: StoredField
    """The shape and type of an action in the replay."""

    def noise_shape(self, architecture: Architecture) -> tuple[int, int]:
        """See `Algorithm`; `architecture` is the actor's."""
        return 0, 0

    @abstractmethod
    def best(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        """The actor's most likely actions [P, E, ...], in the environment's action space."""

    @abstractmethod
    def explored(
        self, outputs: Tensors, mask: Tensor | None, recurrent: RecurrentInput | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Sampled actions [P, E, ...] with noise, and the noise if it carries over from step to step."""

    @abstractmethod
    def random(self, action: Tensor, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Uniformly random actions in the shape of `action` [P, E, ...]."""

    @abstractmethod
    def expectation(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator | None) -> Expectation:
        """An expectation under the policy; without a generator, the mean before tanh replaces the sample."""

    @abstractmethod
    def q_values(self, critics: StackedNetwork, observation: Observation, action: Tensor | None) -> Tensor:
        """Critics' values Q(s, a) [C, P, B, K] of the K actions of an expectation."""

    @abstractmethod
    def q_of_action(self, critics: StackedNetwork, observation: Observation, action: Tensor) -> Tensor:
        """Critics' values Q(s, a) [C, P, B] of actions [P, B, ...] in the environment's action space."""

    @abstractmethod
    def target_entropy(self, given: Tensor | None, share: Tensor, mask: Tensor | None) -> Tensor:
        """The target entropy [P, 1], or [P, B] if `mask` [P, B, A] forbids actions.

        `given` [P] is the configured target, if any, and `share` [P] the configured share of the maximum entropy.
        """


class SampledActions(Actions):
    """Bounded continuous actions from a squashed Gaussian; an expectation is over one sample.

    With state-dependent noise the Gaussian's scale is that of this noise, and gradients flow through the features that
    it depends on. Actions reuse the noise matrices that environments hold; expectations use independent samples.
    """

    values = 1

    def __init__(self, interface: EnvSpec, exploration: ActionNoise, noise: StateDependentNoise | None) -> None:
        self.reads = with_action(interface, "sac", TAKES)
        self.distribution = SquashedGaussian(interface.action)
        self.noise = noise
        self.heads = self.distribution.heads if noise is None else (self.distribution.heads[0], *noise.heads)
        self.stored = (interface.action.shape or (), torch.float32)
        self.exploration = exploration

    def noise_shape(self, architecture: Architecture) -> tuple[int, int]:
        if self.noise is not None:
            return self.noise.shape(architecture)
        return (1, self.distribution.bounds.size) if self.exploration.kept else (0, 0)

    def best(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        return self.distribution.bounds.to_environment(torch.tanh(outputs["action"]))

    def explored(
        self, outputs: Tensors, mask: Tensor | None, recurrent: RecurrentInput | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        if self.noise is not None:
            held, state = self.noise.draw(outputs, recurrent, generator)
            return self.distribution.to_environment(self.distribution.moved(self.noise.gaussian(outputs), held)), state
        sampled = torch.tanh(self.distribution.sample(outputs, None, generator))
        noise, state = self.exploration.draw(sampled, recurrent, generator)
        return self.distribution.bounds.to_environment((sampled + noise).clamp(-1.0, 1.0)), state

    def random(self, action: Tensor, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        numbers = random_numbers(action.view(*action.shape[:2], -1), generator)
        return self.distribution.bounds.to_environment(numbers)

    def expectation(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator | None) -> Expectation:
        outputs = self.distribution.bounded(outputs if self.noise is None else self.noise.gaussian(outputs))
        unclipped = outputs["action"] if generator is None else self.distribution.sample(outputs, None, generator)
        log_prob = self.distribution.log_prob(outputs, None, unclipped).unsqueeze(-1)
        return Expectation(torch.ones_like(log_prob), log_prob, torch.tanh(unclipped))

    def q_values(self, critics: StackedNetwork, observation: Observation, action: Tensor | None) -> Tensor:
        assert action is not None
        return torch.stack(list(critics({**observation, ACTION: action}).values()))

    def q_of_action(self, critics: StackedNetwork, observation: Observation, action: Tensor) -> Tensor:
        return self.q_values(critics, observation, self.distribution.bounds.from_environment(action)).squeeze(-1)

    def target_entropy(self, given: Tensor | None, share: Tensor, mask: Tensor | None) -> Tensor:
        target = torch.full_like(share, -self.distribution.bounds.size) if given is None else given
        return target.unsqueeze(-1)


class AllActions(Actions):
    """Discrete actions (arXiv 1910.07207); an expectation is over all actions, exactly."""

    stored = (), torch.int64

    def __init__(self, interface: EnvSpec, exploration: ActionNoise, noise: StateDependentNoise | None) -> None:
        """Raises UserError if action noise is configured, which discrete actions do not support."""
        if exploration.noise != "none":
            raise UserError(
                f"algorithm.exploration.noise: {exploration.noise} noise is for a Box, and {interface.environment} has "
                f"{interface.action}; leave it out"
            )
        self.reads = interface.parts
        (self.values,) = choices(interface.action)
        self.distribution = Categorical((self.values,))
        self.heads = self.distribution.heads

    def best(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        return self.distribution.mode(outputs, mask)

    def explored(
        self, outputs: Tensors, mask: Tensor | None, recurrent: RecurrentInput | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        return self.distribution.sample(outputs, mask, generator), None

    def random(self, action: Tensor, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        return random_choices(self.values, action.shape, mask, generator)

    def expectation(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator | None) -> Expectation:
        log_prob = self.distribution.logits(outputs, mask).log_softmax(-1)
        return Expectation(log_prob.exp(), log_prob, None)

    def q_values(self, critics: StackedNetwork, observation: Observation, action: Tensor | None) -> Tensor:
        return torch.stack(list(critics(observation).values()))

    def q_of_action(self, critics: StackedNetwork, observation: Observation, action: Tensor) -> Tensor:
        values = self.q_values(critics, observation, None)
        return values.gather(-1, action.expand(len(values), *action.shape).unsqueeze(-1)).squeeze(-1)

    def target_entropy(self, given: Tensor | None, share: Tensor, mask: Tensor | None) -> Tensor:
        # Masked actions do not count: a target that no policy can reach would raise the temperature for ever.
        most = share.new_tensor(math.log(self.values)) if mask is None else mask.sum(-1).clamp(min=1).log()
        if given is None:
            return share.unsqueeze(-1) * most
        return torch.minimum(given.unsqueeze(-1), REACHABLE * most)


ACTIONS: Mapping[type, Callable[[EnvSpec, ActionNoise, StateDependentNoise | None], Actions]] = {
    gym.spaces.Box: SampledActions,
    gym.spaces.Discrete: AllActions,
}


class SAC(OffPolicy):
    """SAC for a stack of agents: an actor, two critics with target networks, and a temperature."""

    Settings = SACSettings
    metrics = ("td_error", "q_values", "entropy", "temperature")

    def __init__(self, config: Config[SACSettings], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        kind = known_kind(interface.action, ACTIONS)
        if kind is None:
            raise wrong_actions(self.settings.name, interface, TAKES)
        noise = state_dependent_noise(config, interface, learned=True)
        self.actions = ACTIONS[kind](interface, self.settings.exploration, noise)
        self.explores_by_noise = self.settings.exploration.noise != "none"
        self.stored_action = self.actions.stored
        temperature = StandardNetwork({}, [Head("log_temperature", 1, constant=True)], (), "uniform")
        critics = [Head(name, self.actions.values) for name in TWIN_CRITICS]
        self.networks = {
            "actor": self.network(interface.parts, self.actions.heads, "shared"),
            "critics": self.network(self.actions.reads, critics, "all", Polyak("tau")),
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
        keep_scales(agent, "actor", origin.state_dependent_noise, self.settings.state_dependent_noise)
        return super().adopt(agent, origin)

    def noise_shape(self, architectures: Architectures) -> tuple[int, int]:
        return self.actions.noise_shape(architectures["actor"])

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Sample actions, or take the most likely ones if `deterministic`."""
        mask, generator = inputs.action_mask, inputs.generator
        outputs = stack.networks["actor"](inputs.observation)
        if inputs.deterministic:
            return ActOutput(self.actions.best(outputs, mask))
        action, noise = self.actions.explored(outputs, mask, inputs.recurrent, generator)
        action = self.settings.exploration.random_at_first(
            action, stack.state["steps"], lambda: self.actions.random(action, mask, generator)
        )
        return ActOutput(action, recurrent_state=noise)

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """State values E[min Q(s, a)] [P, E], without entropy; for a Box, at the policy's mean action."""
        policy = self.expectation(stack, observation, None)
        return policy.of(self.actions.q_values(stack.networks["critics"], observation, policy.action).amin(0))

    def critic_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Squared td_error of the critics from targets with soft next values (1812.05905, eq. 5 and 6)."""
        with torch.no_grad():
            next_observation = batch.next_observation
            policy = self.expectation(stack, next_observation, generator)
            next_q_values = self.actions.q_values(
                stack.target_networks["critics"], next_observation, policy.action
            ).amin(0)
            temperature = self.log_temperature(stack).exp()
            next_value = soft_value(policy.probability, policy.log_prob, next_q_values, temperature)
            discount = self.discount(stack.hyperparameters["gamma"])
            target = bootstrapped_return(batch.columns, discount, next_value)
        q_values = self.actions.q_of_action(stack.networks["critics"], batch.observation, batch.columns["action"])
        return critic_loss(q_values, target)

    def actor_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Policy loss E[alpha log pi(a|s) - min Q(s, a)] [P, B], the negative soft value (1812.05905, eq. 7)."""
        policy = self.expectation(stack, batch.observation, generator)
        q_values = self.actions.q_values(stack.networks["critics"], batch.observation, policy.action).amin(0)
        temperature = self.log_temperature(stack).exp()
        loss = -soft_value(policy.probability, policy.log_prob, q_values, temperature)

        @torch.no_grad()
        def metrics() -> Tensors:
            return {"entropy": policy.entropy(), "temperature": temperature.squeeze(-1).expand_as(loss)}

        return Loss(loss, metrics)

    def temperature_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Temperature loss, which raises the temperature where the entropy is below its target."""
        with torch.no_grad():
            policy = self.expectation(stack, batch.observation, generator)
            target_entropy = self.target_entropy(stack, batch.observation.get("action_mask"))
        return Loss(temperature_loss(self.log_temperature(stack).squeeze(-1), policy.entropy(), target_entropy))

    def expectation(self, stack: Stack, observation: Observation, generator: torch.Generator | None) -> Expectation:
        """Expectation under each agent's policy in an observation."""
        outputs = stack.networks["actor"](observation)
        return self.actions.expectation(outputs, observation.get("action_mask"), generator)

    def log_temperature(self, stack: Stack) -> Tensor:
        """The log-temperature [P, 1, 1] of each agent."""
        return stack.networks["temperature"]({})["log_temperature"] + math.log(self.settings.initial_temperature)

    def target_entropy(self, stack: Stack, mask: Tensor | None) -> Tensor:
        """The target entropy [P, 1], or [P, B] if `mask` [P, B, A] forbids actions."""
        hparams = stack.hyperparameters
        return self.actions.target_entropy(hparams.get("target_entropy"), hparams["target_entropy_share"], mask)
