"""Twin delayed DDPG, TD3 (arXiv 1802.09477), which reduces DDPG's overestimation of values.

Axes: P agents, B batch, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from evorl.algorithms.ddpg import DDPG, DDPGSettings, actor_action
from evorl.algorithms.exploration import ActionNoise
from evorl.algorithms.replayed import TWIN_CRITICS
from evorl.config.fields import HyperparameterRange, Size, Weight
from evorl.networks.stack import Stack
from evorl.types import Observation


class TD3Settings(DDPGSettings):
    name: str = "td3"
    policy_delay: Size = 2
    """Updates of an agent's critics for each update of its actor and of its target networks."""
    target_noise: Weight = 0.2
    """The standard deviation of the noise on actions by which critics learn, which are between -1 and 1."""
    target_noise_clip: Weight = 0.5
    """The most that this noise may be."""
    exploration: ActionNoise = ActionNoise()  # type: ignore[assignment]

    hyperparameters: ClassVar[tuple[str, ...]] = (*DDPGSettings.hyperparameters, "target_noise", "target_noise_clip")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        **DDPGSettings.ranges,
        "target_noise": HyperparameterRange(min=0.05, max=0.4),
    }


class TD3(DDPG):
    """DDPG with clipped double Q-learning, target policy smoothing and delayed policy updates."""

    critics = TWIN_CRITICS

    @property
    def delay(self) -> int:
        return int(self.settings.policy_delay)

    def target_action(self, stack: Stack, observation: Observation, generator: torch.Generator) -> Tensor:
        """The target actor's actions [P, B, A] with clipped noise (arXiv 1802.09477, section 5.3)."""
        action = actor_action(stack.targets["actor"], observation)
        scale, clip = (stack.hyperparameters[name].view(-1, 1, 1) for name in ("target_noise", "target_noise_clip"))
        noise = scale * torch.randn(action.shape, generator=generator, device=action.device)
        return (action + noise.clamp(-clip, clip)).clamp(-1.0, 1.0)
