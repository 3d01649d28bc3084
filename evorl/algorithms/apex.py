"""Ape-X (arXiv 1803.00933): DQN and DDPG on a prioritised replay filled by actors, each with its own exploration.

Actors compute the initial priorities from their own errors. The learner makes one update for every `learn_step` steps
that arrive, whatever the machine's speed. Axes: P agents, E environments, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from evorl.algorithms.ddpg import DDPG, DDPGSettings
from evorl.algorithms.dqn import DQN, DQNSettings
from evorl.algorithms.exploration import EpsilonGreedy
from evorl.config import Config
from evorl.config.fields import Positive, Section, Size, Weight
from evorl.envs.spaces import EnvSpec
from evorl.networks.stack import Stack
from evorl.types import UserError

NOISE_SCALE = "noise_scale"
NONE = EpsilonGreedy(start=0.0, end=0.0, decay=1.0)


class EpsilonLadder(Section):
    """Actor i of N takes random actions with probability `base` ** (1 + i / (N - 1) * `exponent`), section 4 there."""

    base: Annotated[float, Field(gt=0, le=1)] = 0.4
    """The probability of the first actor."""
    exponent: Weight = 7.0
    """The rate at which it falls from actor to actor."""

    def rung(self, index: int, count: int) -> float:
        """The exploration rate of actor `index` of `count`."""
        return float(self.base ** (1 + index / max(1, count - 1) * self.exponent))


class NoiseLadder(Section):
    """Actor i of N has noise of `low` to `high` times the scale, in equal ratios; a single one has it as it is."""

    low: Positive = 0.5
    """The factor of the first actor."""
    high: Positive = 2.0
    """The factor of the last actor."""

    def rung(self, index: int, count: int) -> float:
        """The factor on the noise scale of actor `index` of `count`."""
        return 1.0 if count == 1 else float(self.low * (self.high / self.low) ** (index / (count - 1)))


class ApeXDQNSettings(DQNSettings):
    name: str = "apex_dqn"
    rollout_steps: Size = 16
    """Steps of each environment that an actor makes with one set of parameters and sends together."""
    ladder: EpsilonLadder = EpsilonLadder()
    exploration: EpsilonGreedy = NONE
    """Nothing to set: actors explore by the ladder."""

    sends: ClassVar[str | None] = "transitions"

    @property
    def sent_steps(self) -> int:
        """Steps of each environment in one message of an actor."""
        return self.rollout_steps

    @model_validator(mode="after")
    def _explores_by_the_ladder(self) -> Self:
        if self.exploration != NONE:
            raise ValueError("exploration: actors explore by `ladder`; set that")
        return self


class ApeXDDPGSettings(DDPGSettings):
    name: str = "apex_ddpg"
    rollout_steps: Size = 16
    """Steps of each environment that an actor makes with one set of parameters and sends together."""
    ladder: NoiseLadder = NoiseLadder()

    sends: ClassVar[str | None] = "transitions"

    @property
    def sent_steps(self) -> int:
        """Steps of each environment in one message of an actor."""
        return self.rollout_steps


class ApeXDQN(DQN):
    """DQN whose actors each have their own exploration rate."""

    Settings = ApeXDQNSettings

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        check_replay(config)

    def actor_state(self, index: int, count: int) -> Mapping[str, float]:
        """The exploration rate of actor `index` of `count`."""
        return {"epsilon": self.settings.ladder.rung(index, count)}


class ApeXDDPG(DDPG):
    """DDPG whose actors each have their own noise scale."""

    Settings = ApeXDDPGSettings
    state_limits: ClassVar[Mapping[str, float]] = {NOISE_SCALE: 1e9}

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        check_replay(config)

    def initial_state(self) -> dict[str, float]:
        """A new agent's step count and noise scale."""
        return {**super().initial_state(), NOISE_SCALE: 1.0}

    def actor_state(self, index: int, count: int) -> Mapping[str, float]:
        """The noise scale of actor `index` of `count`."""
        return {NOISE_SCALE: self.settings.ladder.rung(index, count)}

    def scaled(self, stack: Stack, noise: Tensor) -> Tensor:
        """The noise [P, E, A], multiplied by the actor's noise scale."""
        return noise * stack.state[NOISE_SCALE].float().view(-1, 1, 1)


def check_replay(config: Config[Any]) -> None:
    """Raise UserError unless the replay is prioritised and rollouts are at least as long as n-step windows."""
    if config.replay.prioritised is None:
        raise UserError(f"replay.prioritised: {config.algorithm.name} draws by priorities; set replay.prioritised={{}}")
    steps, n = config.algorithm.rollout_steps, config.replay.n_step
    if n > steps:
        raise UserError(f"replay.n_step: {n} steps are more than the {steps} of algorithm.rollout_steps")
