"""Suites of environments whose packages are optional: the extra that installs each, and how it is registered."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import WrapperSpec

from evorl.system.extras import require

ATARI = "ALE/"
MUJOCO = "gymnasium.envs.mujoco"
MINATAR = "MinAtar/"
ENLARGED = 32
"""The width in a picture of each of the 10 x 10 cells of a MinAtar game, in pixels."""


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


def suite_of(name: str) -> str | None:
    """The extra that the environment of this name, without a module, needs; None for any other environment."""
    for beginning, extra in ((ATARI, "atari"), (MINATAR, "minatar")):
        if name.startswith(beginning):
            return extra
    # Gymnasium registers MuJoCo's environments whether or not MuJoCo is installed.
    spec = gym.registry.get(name)
    return "mujoco" if spec is not None and str(spec.entry_point).startswith(MUJOCO) else None


def register_suite(name: str) -> None:
    """Register an environment with Gymnasium if it is of an optional suite.

    Raises UserError, which names the extra, if a package of the suite is not installed.
    """
    extra = suite_of(name)
    if extra is not None:
        require(extra, f"environment.id: {name!r}")
    if extra == "atari":
        importlib.import_module("ale_py")
    elif extra == "minatar":
        _register_minatar(name)


def _register_minatar(name: str) -> None:
    """Register MinAtar's games, which newer versions of Gymnasium do not find by themselves."""
    if name not in gym.registry:
        importlib.import_module("minatar.gym").register_envs()
    spec = gym.registry.get(name)
    if spec is not None and not spec.additional_wrappers:
        spec.additional_wrappers = (WrapperSpec(SeededGame.__name__, f"{__name__}:{SeededGame.__name__}", {}),)
