"""The registry of algorithms that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evorl.algorithms.a2c import A2C, A2CSettings
from evorl.algorithms.a3c import (
    A3C,
    A3CDataParallel,
    A3CDataParallelSettings,
    A3CSettings,
    A3CShared,
    A3CSharedSettings,
)
from evorl.algorithms.apex import ApeXDDPG, ApeXDDPGSettings, ApeXDQN, ApeXDQNSettings
from evorl.algorithms.base import Algorithm, Objective
from evorl.algorithms.ddpg import DDPG, TD3, DDPGSettings, TD3Settings
from evorl.algorithms.dqn import DQN, DQNSettings
from evorl.algorithms.impala import APPO, IMPALA, APPOSettings, IMPALASettings
from evorl.algorithms.ppo import PPO, PPOSettings
from evorl.algorithms.sac import SAC, SACSettings
from evorl.config import AnyConfig
from evorl.config.fields import AlgorithmSettings
from evorl.envs.spaces import EnvSpec

ALGORITHMS: Mapping[str, tuple[type[AlgorithmSettings], Callable[..., Algorithm]]] = {
    "a2c": (A2CSettings, A2C),
    "a3c": (A3CSettings, A3C),
    "a3c_data_parallel": (A3CDataParallelSettings, A3CDataParallel),
    "a3c_shared": (A3CSharedSettings, A3CShared),
    "apex_ddpg": (ApeXDDPGSettings, ApeXDDPG),
    "apex_dqn": (ApeXDQNSettings, ApeXDQN),
    "appo": (APPOSettings, APPO),
    "ddpg": (DDPGSettings, DDPG),
    "dqn": (DQNSettings, DQN),
    "impala": (IMPALASettings, IMPALA),
    "ppo": (PPOSettings, PPO),
    "sac": (SACSettings, SAC),
    "td3": (TD3Settings, TD3),
}
"""Settings and constructor of each algorithm."""

SETTINGS: Mapping[str, type[AlgorithmSettings]] = {name: settings for name, (settings, _) in ALGORITHMS.items()}


def make_algorithm(config: AnyConfig, interface: EnvSpec) -> Algorithm:
    """Return the configured algorithm for an environment's interface. Raises UserError if it does not support it."""
    _, constructor = ALGORITHMS[config.algorithm.name]
    return constructor(config, interface)


__all__ = ["ALGORITHMS", "SETTINGS", "Algorithm", "Objective", "make_algorithm"]
