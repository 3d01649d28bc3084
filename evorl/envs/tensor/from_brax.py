"""Environments of brax (`brax:NAME`): robots, in JAX.

As in its own training, a copy begins each episode in the state in which its first one began, because a reset costs
more than a step; the random numbers in its state go on.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import torch

from evorl.config import Environment
from evorl.envs.tensor.jax_simulator import JaxSimulator, Task
from evorl.types.messages import nearest
from evorl.types.outcomes import UserError

EPISODE = 1_000
"""Steps of an episode of brax, as in its own training; `environment.kwargs.episode_length` sets others."""


def simulator(settings: Environment, name: str, copies: int, device: torch.device) -> JaxSimulator:
    """N copies of a brax environment. Raises UserError for an unknown name."""
    from brax import envs

    names = sorted(envs._envs)
    if name not in names:
        raise UserError(f"environment.id: brax has no environment {name!r}{nearest(name, names)}")
    kwargs = dict(settings.kwargs)
    limit = int(kwargs.pop("episode_length", EPISODE))
    env = envs.get_environment(name, **kwargs)
    return JaxSimulator(BraxTask(env, limit), copies, device)


class BraxTask(Task):
    """An environment of brax, whose episodes are truncated after `limit` steps."""

    def __init__(self, env: Any, limit: int) -> None:
        self.env, self.limit = env, limit
        shown = jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shown.shape, np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)

    def reset(self, key: Any) -> tuple[Any, Any]:
        state = self.env.reset(key)
        return (state, jnp.int32(0)), state.obs

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        before, steps = state
        after, steps = self.env.step(before, action), steps + 1
        terminated = after.done > 0
        truncated = jnp.logical_and(steps >= self.limit, jnp.logical_not(terminated))
        return (after, steps), after.obs, after.reward, terminated, truncated, dict(after.metrics)

    def first(self, state: Any, observation: Any) -> Any:
        return state[0].pipeline_state, observation

    def restart(self, key: Any, state: Any, first: Any) -> tuple[Any, Any]:
        physics, observation = first
        after = state[0].replace(pipeline_state=physics, obs=observation, done=jnp.zeros_like(state[0].done))
        return (after, jnp.int32(0)), observation

    def picture(self, state: Any, observation: Any) -> Any:
        """MuJoCo's picture of a state."""
        from brax.io import image

        return image.render_array(self.env.sys, state[0].pipeline_state, height=240, width=320)
