"""The registry of algorithms that a configuration can name."""

from __future__ import annotations

from collections.abc import Mapping

from evorl.algorithms.a2c import A2C
from evorl.algorithms.a3c import A3C, A3CDataParallel, A3CShared
from evorl.algorithms.apex import ApeXDDPG, ApeXDQN
from evorl.algorithms.base import Algorithm, Objective
from evorl.algorithms.ddpg import DDPG, TD3
from evorl.algorithms.dqn import DQN
from evorl.algorithms.impala import APPO, IMPALA
from evorl.algorithms.ppo import PPO
from evorl.algorithms.sac import SAC
from evorl.config import AnyConfig
from evorl.envs.spaces import EnvSpec
from evorl.system.plugins import installed
from evorl.types.outcomes import UserError

ALGORITHMS: Mapping[str, type[Algorithm]] = {
    "a2c": A2C,
    "a3c": A3C,
    "a3c_data_parallel": A3CDataParallel,
    "a3c_shared": A3CShared,
    "apex_ddpg": ApeXDDPG,
    "apex_dqn": ApeXDQN,
    "appo": APPO,
    "ddpg": DDPG,
    "dqn": DQN,
    "impala": IMPALA,
    "ppo": PPO,
    "sac": SAC,  # type: ignore[type-abstract]
    "td3": TD3,
}


def make_algorithm(config: AnyConfig, interface: EnvSpec) -> Algorithm:
    """Build the configured algorithm for an environment. Raises UserError if it does not support it."""
    name = config.algorithm.name
    algorithm: type[Algorithm] | None = ALGORITHMS.get(name) or installed("evorl.algorithms", name, Algorithm)
    if algorithm is None:
        raise UserError(f"algorithm.name: {name} has settings, but no entry point in the group evorl.algorithms")
    return algorithm.variant(interface)(config, interface)


__all__ = ["ALGORITHMS", "Algorithm", "Objective", "make_algorithm"]
