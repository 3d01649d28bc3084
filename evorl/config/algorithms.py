"""The settings of every algorithm that a configuration can name; they need no torch, which takes a second to import."""

from __future__ import annotations

from collections.abc import Mapping

from evorl.config.actor_critic import (
    A2CSettings,
    A3CDataParallelSettings,
    A3CSettings,
    A3CSharedSettings,
    APPOSettings,
    IMPALASettings,
    PPOSettings,
)
from evorl.config.fields import AlgorithmSettings
from evorl.config.off_policy import (
    ApeXDDPGSettings,
    ApeXDQNSettings,
    DDPGSettings,
    DQNSettings,
    SACSettings,
    TD3Settings,
)

SETTINGS: Mapping[str, type[AlgorithmSettings]] = {
    "a2c": A2CSettings,
    "a3c": A3CSettings,
    "a3c_data_parallel": A3CDataParallelSettings,
    "a3c_shared": A3CSharedSettings,
    "apex_ddpg": ApeXDDPGSettings,
    "apex_dqn": ApeXDQNSettings,
    "appo": APPOSettings,
    "ddpg": DDPGSettings,
    "dqn": DQNSettings,
    "impala": IMPALASettings,
    "ppo": PPOSettings,
    "sac": SACSettings,
    "td3": TD3Settings,
}
