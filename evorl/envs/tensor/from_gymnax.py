"""Environments of gymnax 1.0 and later (`gymnax:NAME`): classic control, MinAtar, bsuite, in JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import torch

from evorl.config import Environment
from evorl.envs.suites import ENLARGED
from evorl.envs.tensor.jax_simulator import JaxSimulator, Task, as_gymnasium
from evorl.types.messages import nearest
from evorl.types.outcomes import UserError


def simulator(settings: Environment, name: str, copies: int, device: torch.device) -> JaxSimulator:
    """N copies of a gymnax environment. Raises UserError for an unknown name."""
    return JaxSimulator(GymnaxTask(settings, name), copies, device)


class GymnaxTask(Task):
    """A gymnax environment; `environment.kwargs` are fields of its parameters, or arguments of its constructor."""

    def __init__(self, settings: Environment, name: str) -> None:
        import gymnax

        names = list(gymnax.registered_envs)
        if name not in names:
            raise UserError(f"environment.id: gymnax has no environment {name!r}{nearest(name, names)}")
        _, params = gymnax.make(name)
        fields = {field.name for field in dataclasses.fields(params)}
        changed = {key: value for key, value in settings.kwargs.items() if key in fields}
        others = {key: value for key, value in settings.kwargs.items() if key not in fields}
        try:
            self.env, params = gymnax.make(name, **others)
        except TypeError as error:
            raise UserError(
                f"environment.kwargs: gymnax:{name} takes {', '.join(sorted(fields))}, not {', '.join(others)}: {error}"
            ) from error
        self.params: Any = params.replace(**changed)
        self.action_space = as_gymnasium(self.env.action_space(self.params))
        self.limit = int(self.params.max_steps_in_episode)
        self.observation_space = self._observation_space()

    def _observation_space(self) -> gym.Space[Any]:
        """The declared space; images of zeros and ones, as those of MinAtar, take a byte for each number."""
        declared = as_gymnasium(self.env.observation_space(self.params))
        shown = jax.eval_shape(lambda key: self.env.reset_env(key, self.params)[0], jax.random.PRNGKey(0))
        self._is_binary = (
            isinstance(declared, gym.spaces.Box)
            and len(declared.shape) == 3
            and bool((declared.low == 0).all() and (declared.high == 1).all())
            and self.env.name.endswith("MinAtar")
        )
        if self._is_binary:
            return gym.spaces.Box(0, 1, shown.shape, bool)
        if isinstance(declared, gym.spaces.Box) and declared.shape != shown.shape:
            return gym.spaces.Box(-np.inf, np.inf, shown.shape, np.float32)
        return declared

    def _shown(self, observation: Any) -> Any:
        return observation.astype(jnp.uint8) if self._is_binary else observation

    def reset(self, key: Any) -> tuple[Any, Any]:
        observation, state = self.env.reset_env(key, self.params)
        return state, self._shown(observation)

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        observation, state, reward, terminated, info = self.env.step_env(key, state, action, self.params)
        truncated = self.env.is_truncated(state, self.params)
        return state, self._shown(observation), reward, terminated, truncated, info

    def picture(self, state: Any, observation: Any) -> Any:
        """A picture in which each channel of a binary image has its own colour; None for other observations."""
        if not self._is_binary:
            return None
        flags = np.asarray(observation)
        channels = np.arange(1, flags.shape[2] + 1)
        colours = 80 + 97 * channels[:, None] * np.array([1, 3, 7]) % 176
        picture = (flags[..., None] * colours).max(2).astype(np.uint8)
        return picture.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
