"""Vector environments: what resets do, faults and masks are decided here and nowhere else."""

from evorl.envs.environments import Environments

__all__ = ["Environments"]
