"""Environments whose copies are tensors of one simulator, on its device."""

from evorl.envs.tensor.environments import TensorEnvironments
from evorl.envs.tensor.sources import is_tensor

__all__ = ["TensorEnvironments", "is_tensor"]
