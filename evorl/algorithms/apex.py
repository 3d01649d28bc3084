"""Ape-X (arXiv 1803.00933): DQN and DDPG on a prioritised replay that actors fill.

Actors compute the initial priorities from their own errors. The learner makes one update for every `learn_step` steps
that arrive, whatever the machine's speed. Axis: E environments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evorl.algorithms.ddpg import DDPG
from evorl.algorithms.dqn import DQN
from evorl.algorithms.off_policy import OffPolicy
from evorl.config import Config
from evorl.config.off_policy import EpsilonLadder
from evorl.envs.spaces import EnvSpec
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors


def exploration_rates(ladder: EpsilonLadder, index: int, count: int, envs: int) -> Tensor:
    """The exploration rates [E] in the `envs` environments of actor `index` of `count`."""
    first = index * envs
    share = torch.arange(first, first + envs, dtype=torch.float64) / max(1, count * envs - 1)
    return torch.pow(ladder.base, 1 + share * ladder.exponent)


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

    def actor_state(self, index: int, count: int) -> Tensors:
        envs = self.config.environment.num_envs
        return {"epsilon": exploration_rates(self.settings.ladder, index, count, envs)}


class ApeXDDPG(ApeX, DDPG):
    """DDPG that learns from actors' transitions."""
