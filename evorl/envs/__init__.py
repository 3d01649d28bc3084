"""Vector environments. All reset, fault and action-mask semantics live in this package."""

from evorl.envs.environments import Environments

__all__ = ["Environments"]
