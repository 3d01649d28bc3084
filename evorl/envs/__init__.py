"""Vector environments. All reset, fault and action-mask semantics live in this package."""

from __future__ import annotations

import torch

from evorl.config import Environment
from evorl.envs.environments import Environments
from evorl.envs.stepped import SteppedEnvironments
from evorl.envs.tensor import TensorEnvironments, is_tensor


def make_environments(
    settings: Environment,
    agents: int,
    num_envs: int,
    device: torch.device | str = "cpu",
    *,
    whole_games: bool = False,
) -> SteppedEnvironments:
    """The environments of these agents, as `Environments` has them, or as slices of one simulator on the device."""
    if is_tensor(settings.id):
        return TensorEnvironments(settings, agents, num_envs, device)
    return Environments(settings, agents, num_envs, device, whole_games=whole_games)


__all__ = ["Environments", "SteppedEnvironments", "make_environments"]
