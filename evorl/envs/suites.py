"""Suites of environments whose packages are optional: the extra that installs each, and how it is registered."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import WrapperSpec

from evorl.system.extras import install_command
from evorl.types.outcomes import UserError

ATARI = "ALE/"
MUJOCO = "gymnasium.envs.mujoco"
MINATAR = "MinAtar/"
ENLARGED = 32
"""The width in a picture of each of the 10 x 10 cells of a MinAtar game, in pixels."""


@dataclass(frozen=True)
class Suite:
    """Environments of an optional package."""

    title: str
    """The suite's name, for errors."""
    extra: str
    """The extra of this package that installs what the environments need."""
    modules: tuple[str, ...]
    """The modules that they need. Importing the first registers them, unless `register` or Gymnasium does."""
    owns: Callable[[str], bool]
    """Return whether the environment of this name, without a module, is one of the suite's."""
    register: Callable[[ModuleType, str], None] | None = None
    """Register the environment of this name, given the first of the modules."""


def _is_mujoco(name: str) -> bool:
    """Gymnasium registers MuJoCo's environments whether or not MuJoCo is installed."""
    spec = gym.registry.get(name)
    return spec is not None and str(spec.entry_point).startswith(MUJOCO)


class SeededGame(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """A MinAtar game (arXiv 1903.03176) whose episodes are determined by a seed, or by `np_random`, and their actions.

    The games draw from a generator of their own, which a reset seeds from `np_random`. By default a sticky first action
    repeats the last action of the previous episode; here it repeats action 0, a no-op.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        inner: Any = self.env.unwrapped
        gym.Env.reset(inner, seed=seed)
        inner.game.seed(int(inner.np_random.integers(2**32)))
        inner.game.last_action = 0
        return self.env.reset(options=options)

    def render(self) -> Any:
        """The game's picture; an `rgb_array` is scaled from [0, 1] to bytes and enlarged."""
        # Bypass Gymnasium's checks, which would warn about what is fixed here.
        shown: Any = self.env.unwrapped.render()
        if self.render_mode != "rgb_array":
            return shown
        return (255 * shown).astype(np.uint8).repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)


def _register_minatar(package: ModuleType, name: str) -> None:
    """Register MinAtar's games, which newer versions of Gymnasium do not find by themselves."""
    if name not in gym.registry:
        package.register_envs()
    spec = gym.registry.get(name)
    if spec is not None and not spec.additional_wrappers:
        spec.additional_wrappers = (WrapperSpec(SeededGame.__name__, f"{__name__}:{SeededGame.__name__}", {}),)


SUITES: tuple[Suite, ...] = (
    Suite("Atari", "atari", ("ale_py",), lambda name: name.startswith(ATARI)),
    Suite("MuJoCo", "mujoco", ("mujoco", "imageio"), _is_mujoco),
    Suite("MinAtar", "minatar", ("minatar.gym",), lambda name: name.startswith(MINATAR), _register_minatar),
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
                    f"environment.id: {name!r} needs the {suite.title} extra: {install_command(suite.extra)}"
                ) from error
            if suite.register is not None:
                suite.register(modules[0], name)
