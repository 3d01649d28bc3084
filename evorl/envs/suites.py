"""Suites of environments whose packages are optional: the extra that installs each, and how it is registered."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import gymnasium as gym

from evorl.types import UserError

ATARI = "ALE/"
MUJOCO = "gymnasium.envs.mujoco"


@dataclass(frozen=True)
class Suite:
    """Environments of an optional package."""

    title: str
    """The suite's name, for errors."""
    extra: str
    """The extra of this package that installs what the environments need."""
    modules: tuple[str, ...]
    """The modules that they need. Importing the first one registers them, or `register` does so."""
    owns: Callable[[str], bool]
    """Return whether the environment of this name, without a module, is one of the suite's."""
    register: Callable[[ModuleType, str], None] | None = None
    """Register the environment of this name, given the first of the modules."""


def _is_mujoco(name: str) -> bool:
    """Gymnasium registers MuJoCo's environments whether or not MuJoCo is installed."""
    spec = gym.registry.get(name)
    return spec is not None and str(spec.entry_point).startswith(MUJOCO)


SUITES: tuple[Suite, ...] = (
    Suite("Atari", "atari", ("ale_py",), lambda name: name.startswith(ATARI)),
    Suite("MuJoCo", "mujoco", ("mujoco", "imageio"), _is_mujoco),
)


def register_suite(name: str) -> None:
    """Register an environment with Gymnasium if it is of an optional suite.

    Raises UserError, which names the extra, if a package of the suite is not installed.
    """
    for suite in SUITES:
        if suite.owns(name):
            try:
                modules = [importlib.import_module(module) for module in suite.modules]
            except ModuleNotFoundError as error:
                raise UserError(
                    f"environment.id: {name!r} needs the {suite.title} extra: pip install -e '.[{suite.extra}]'"
                ) from error
            if suite.register is not None:
                suite.register(modules[0], name)
