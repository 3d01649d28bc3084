"""The settings of every algorithm that a configuration can name; they need no torch, which takes a second to import."""

from __future__ import annotations

import site
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, distributions
from typing import Any

from evorl.config.actor_critic import (
    A2CSettings,
    A3CDataParallelSettings,
    A3CSettings,
    A3CSharedSettings,
    APPOSettings,
    IMPALASettings,
    PPOSettings,
)
from evorl.config.errors import shown
from evorl.config.fields import AlgorithmSettings
from evorl.config.off_policy import (
    ApeXDDPGSettings,
    ApeXDQNSettings,
    DDPGSettings,
    DQNSettings,
    SACSettings,
    TD3Settings,
)
from evorl.types.outcomes import UserError

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


def site_packages() -> list[str]:
    """The directories of installed packages, those of the system and the user's own."""
    return [*site.getsitepackages(), site.getusersitepackages()]


def entries(group: str) -> Iterator[EntryPoint]:
    """The entry points of installed packages in this group.

    Only what lies in site-packages is installed: the working directory, which may be on the path, can be a stranger's.
    """
    packages = distributions(path=site_packages())
    return (entry for package in packages for entry in package.entry_points if entry.group == group)


def installed(group: str, name: str, base: type) -> Any:
    """The subclass of `base` that an installed package has as an entry point of this group and name, or None.

    Raises UserError if it cannot be imported or is another object.
    """
    for entry in entries(group):
        if entry.name != name:
            continue
        where = f"algorithm.name: the entry point {group}: {name} = {entry.value}"
        try:
            found = entry.load()
        except Exception as error:
            raise UserError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(found, type) or not issubclass(found, base):
            raise UserError(f"{where} is {shown(found)}, and no subclass of {base.__name__}")
        return found
    return None
