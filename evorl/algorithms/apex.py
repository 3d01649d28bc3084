"""Ape-X (arXiv 1803.00933): DQN and DDPG on a prioritised replay that actors fill.

Exploration varies over the environments of all actors.

Actors compute the initial priorities from their own errors. The learner makes one update for every `learn_step` steps
that arrive, whatever the machine's speed. Axes: P agents, E environments, A action dimensions.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor

from evorl.algorithms.ddpg import DDPG, DDPGSettings
from evorl.algorithms.dqn import DQN, DQNSettings
from evorl.algorithms.exploration import EpsilonGreedy
from evorl.algorithms.off_policy import OffPolicy
from evorl.config import Config
from evorl.config.fields import Positive, Rate, Section, Size, Weight
from evorl.envs.spaces import EnvSpec
from evorl.networks.stack import Stack
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

NOISE_SCALE = "noise_scale"
NONE = EpsilonGreedy(start=0.0, end=0.0, decay=1.0)


class EpsilonLadder(Section):
    """Environment i of N (from 0) takes random actions with probability `base` ** (1 + i / (N - 1) * `exponent`)
    (arXiv 1803.00933, section 4). N counts the environments of all actors of an agent."""

    base: Rate = 0.4
    """The probability in the first environment."""
    exponent: Weight = 7.0
    """The paper's alpha: the larger, the faster the probability falls over the environments."""

    def rungs(self, index: int, count: int, envs: int) -> Tensor:
        """The exploration rates [E] in the `envs` environments of actor `index` of `count`."""
        return torch.pow(self.base, 1 + _share_climbed(index, count, envs) * self.exponent)


class NoiseLadder(Section):
    """The noise scale rises geometrically over an agent's N environments, from `low` to `high` times `scale`; a single
    environment has `scale` itself. N counts the environments of all actors of an agent."""

    low: Positive = 0.5
    """The factor in the first environment."""
    high: Positive = 2.0
    """The factor in the last environment."""

    def rungs(self, index: int, count: int, envs: int) -> Tensor:
        """The factors [E] on the noise scale in the `envs` environments of actor `index` of `count`."""
        share = _share_climbed(index, count, envs)
        return self.low * torch.pow(self.high / self.low, share) if count * envs > 1 else torch.ones_like(share)


def _share_climbed(index: int, count: int, envs: int) -> Tensor:
    """The places [E] of an actor's environments among those of all actors, from 0 to 1."""
    first = index * envs
    return torch.arange(first, first + envs, dtype=torch.float64) / max(1, count * envs - 1)


class ApeXSettings(Section):
    """The settings of both algorithms that learn from actors' transitions."""

    rollout_steps: Size = 16
    """Steps of each environment that an actor takes with one set of parameters and sends together."""

    actor_messages: ClassVar[str | None] = "transitions"

    @property
    def sent_steps(self) -> int:
        """Steps of each environment in one message of an actor."""
        return self.rollout_steps


class ApeXDQNSettings(ApeXSettings, DQNSettings):
    name: str = "apex_dqn"
    ladder: EpsilonLadder = EpsilonLadder()
    exploration: EpsilonGreedy = NONE
    """Fixed: `ladder` sets epsilon for each environment."""

    @model_validator(mode="after")
    def _explores_by_the_ladder(self) -> Self:
        if self.exploration != NONE:
            raise ValueError("exploration: is fixed; set `ladder`, the epsilons of the environments")
        return self


class ApeXDDPGSettings(ApeXSettings, DDPGSettings):
    name: str = "apex_ddpg"
    ladder: NoiseLadder = NoiseLadder()


class ApeX(OffPolicy):
    """An algorithm that learns from a prioritised replay of actors' transitions."""

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        """Raises UserError unless the replay is prioritised and rollouts are at least as long as n-step windows."""
        super().__init__(config, interface)
        if config.replay.prioritised is None:
            name = config.algorithm.name
            raise UserError(f"replay.prioritised: {name} draws by priorities; set replay.prioritised={{}}")
        steps, n = config.algorithm.rollout_steps, config.replay.n_step
        if n > steps:
            raise UserError(
                f"replay.n_step: {n} exceeds algorithm.rollout_steps {steps}, where windows end; use at most {steps}"
            )


class ApeXDQN(ApeX, DQN):
    """DQN whose actors explore at a different rate in each of their environments."""

    Settings = ApeXDQNSettings

    def actor_state(self, index: int, count: int) -> Tensors:
        return {"epsilon": self.settings.ladder.rungs(index, count, self.config.environment.num_envs)}


class ApeXDDPG(ApeX, DDPG):
    """DDPG whose actors have a different noise scale in each of their environments."""

    Settings = ApeXDDPGSettings

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), NOISE_SCALE: 1.0}

    def actor_state(self, index: int, count: int) -> Tensors:
        return {NOISE_SCALE: self.settings.ladder.rungs(index, count, self.config.environment.num_envs)}

    def scaled(self, stack: Stack, noise: Tensor) -> Tensor:
        return noise * stack.state[NOISE_SCALE].float().view(len(noise), -1, 1)
