"""Deep deterministic policy gradient, DDPG (arXiv 1509.02971), and twin delayed DDPG, TD3 (arXiv 1802.09477).

TD3 reduces DDPG's overestimation of values: clipped double Q-learning, target smoothing and delayed policy updates.
Axes: P agents, E environments, B batch, A action dimensions, C critics. Actions lie in [-1, 1], except for those that
the environment takes.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from evorl.algorithms.base import ActInput, ActOutput, hyperparameter
from evorl.algorithms.exploration import draw_noise, random_at_first, random_numbers
from evorl.algorithms.functional import bootstrapped_return
from evorl.algorithms.off_policy import (
    TWIN_CRITICS,
    OffPolicy,
    actor_learning_rate,
    critic_loss,
)
from evorl.config import Config
from evorl.config.off_policy import ActionNoise
from evorl.envs.spaces import ACTION, EnvSpec, with_action
from evorl.networks.distributions import ActionBounds
from evorl.networks.stack import Architectures, Polyak, Stack, StackedNetwork
from evorl.types.agents import Head
from evorl.types.batches import Batch, Loss, RecurrentInput
from evorl.types.tensors import Observation


class DDPG(OffPolicy):
    """DDPG for a stack of agents: an actor and critics, each with a target network."""

    is_actor_critic = True
    metrics = ("td_error", "q_values")
    explores_by_noise = True
    critics: ClassVar[tuple[str, ...]] = ("value",)
    """The heads of the critics' network, one per critic."""

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        reads, shape = with_action(interface, self.settings.name, self.critic_parts), interface.action.shape or ()
        size = math.prod(shape)
        self.bounds = ActionBounds(interface.action)
        self.stored_action = shape, torch.float32
        self.exploration: ActionNoise = self.settings.exploration
        heads = [Head(name, 1) for name in self.critics]
        outputs = [Head("action", size, near_zero=True)]
        self.networks = {
            "actor": self.network(self.policy_parts, outputs, "shared", Polyak("tau")),
            "critics": self.network(reads, heads, "all", Polyak("tau", every=self.delay)),
        }
        self.objectives = [
            self.objective("critics", self.critic_loss, hyperparameter("learning_rate")),
            self.objective("actor", self.actor_loss, actor_learning_rate, self.delay),
        ]

    def noise_shape(self, architectures: Architectures) -> tuple[int, int]:
        return (1, self.bounds.size) if self.exploration.kept else (0, 0)

    @property
    def delay(self) -> int:
        """The policy delay: critic updates for each update of the actor and of the critics' target networks."""
        return 1

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Take the actor's actions, with exploration noise unless `deterministic`."""
        action, state = actor_action(stack.networks["actor"], inputs.observation), None
        if not inputs.deterministic:
            generator = inputs.generator
            noise, state = draw_noise(self.exploration, action, inputs.recurrent, generator)
            action = (action + noise).clamp(-1.0, 1.0)
            action = random_at_first(
                self.exploration, action, stack.state["steps"], lambda: random_numbers(action, generator)
            )
        return ActOutput(self.bounds.to_environment(action), recurrent_state=state)

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """The minimum over critics of Q(s, actor(s)) [P, E]."""
        action = actor_action(stack.networks["actor"], observation)
        return q_values(stack.networks["critics"], observation, action).amin(0)

    def critic_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Squared td_error of the critics (arXiv 1509.02971, eq. 4 and 5).

        The target bootstraps from the minimum over target critics (TD3: arXiv 1802.09477, section 4.2).
        """
        with torch.no_grad():
            next_observation = batch.next_observation
            next_action = self.target_action(stack, next_observation, generator)
            next_value = q_values(stack.target_networks["critics"], next_observation, next_action).amin(0)
            discount = self.discount(stack.hyperparameters["gamma"])
            target = bootstrapped_return(batch.columns, discount, next_value)
        action = self.bounds.from_environment(batch.columns["action"])
        return critic_loss(q_values(stack.networks["critics"], batch.observation, action), target)

    def target_action(self, stack: Stack, observation: Observation, generator: torch.Generator) -> Tensor:
        """The next actions [P, B, A] of the critics' targets for next observations [P, B, ...]."""
        return actor_action(stack.target_networks["actor"], observation)

    def actor_loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Deterministic policy-gradient loss -Q(s, pi(s)) of the first critic (arXiv 1509.02971, eq. 6)."""
        action = actor_action(stack.networks["actor"], batch.observation)
        critic = stack.networks["critics"].frozen().first_head()
        return Loss(-q_values(critic, batch.observation, action)[0])


def actor_action(actor: StackedNetwork, observation: Observation) -> Tensor:
    """Actions pi(s) [P, B, A] of an actor, squashed by tanh, for observations [P, B, ...]."""
    return torch.tanh(actor(observation)["action"])


def q_values(critics: StackedNetwork, observation: Observation, action: Tensor) -> Tensor:
    """Critics' action values Q(s, a) [C, P, B] of observations [P, B, ...] and actions [P, B, A]."""
    return torch.stack([each.squeeze(-1) for each in critics({**observation, ACTION: action}).values()])


class TD3(DDPG):
    """DDPG with clipped double Q-learning, target policy smoothing and delayed policy updates."""

    critics = TWIN_CRITICS

    @property
    def delay(self) -> int:
        return int(self.settings.policy_delay)

    def target_action(self, stack: Stack, observation: Observation, generator: torch.Generator) -> Tensor:
        """The target actor's actions [P, B, A] with clipped noise (arXiv 1802.09477, section 5.3)."""
        action = actor_action(stack.target_networks["actor"], observation)
        scale, clip = (stack.hyperparameters[name].view(-1, 1, 1) for name in ("target_noise", "target_noise_clip"))
        noise = scale * torch.randn(action.shape, generator=generator, device=action.device)
        return (action + noise.clamp(-clip, clip)).clamp(-1.0, 1.0)
