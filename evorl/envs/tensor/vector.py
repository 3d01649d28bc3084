"""A user's vector environment of tensors, such as those of Isaac Lab, ManiSkill and mjlab. Axes: N copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from evorl.config import Environment
from evorl.envs.faults.checks import check_spaces, reset_mode
from evorl.envs.spaces import MASK, mapped
from evorl.envs.tensor.simulator import Simulator, Step
from evorl.system.plugins import imported
from evorl.types.outcomes import UserError

FINAL = ("final_obs", "final_observation")
"""Info keys under which vector environments give the last observations of episodes that ended in a step."""


class VectorSimulator(Simulator):
    """A user's vector environment of tensors, made by `make(num_envs, device, seed, **kwargs)`."""

    def __init__(self, settings: Environment, path: str, copies: int, device: torch.device) -> None:
        """Raises UserError if the object lacks something, or does not declare when it resets."""
        env = imported("environment.id", path)(copies, device, 0, **settings.kwargs)
        self.env, self._id = env, settings.id
        self.copies, self.device = copies, device
        self.in_step = reset_mode(env, self._id) == AutoresetMode.SAME_STEP
        self.observation_space: Any = getattr(env, "single_observation_space", None)
        self.action_space: Any = getattr(env, "single_action_space", None)
        check_spaces(self.observation_space, self.action_space, self._id)
        if (count := getattr(env, "num_envs", copies)) != copies:
            raise UserError(f"environment.id: {self._id} was asked for {copies} copies and has {count}")
        limit = getattr(env, "max_episode_length", getattr(env, "max_episode_steps", None))
        self.limit = limit if isinstance(limit, int) and limit > 0 else None
        metadata = getattr(env, "metadata", None) or {}
        self.frames_per_second = int(metadata.get("render_fps") or 30)

    def reset(self, seeds: Sequence[int]) -> Any:
        start = self.env.reset(seed=seeds[0])
        if not isinstance(start, tuple) or len(start) != 2:
            raise UserError(f"environment.id: the reset of {self._id} must return a pair (observation, info)")
        observation, info = start
        if MASK in info:
            raise UserError(
                f"environment.id: {self._id} gives info[{MASK!r}], but masks of a simulator are not read: agents would "
                "choose actions that it forbids; leave it out, and let such actions do nothing"
            )
        return mapped(_copied, observation)

    def step(self, action: Tensor) -> Step:
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise UserError(
                f"environment.id: the step of {self._id} must return 5 values (observation, reward, terminated, "
                "truncated, info)"
            )
        observation, reward, terminated, truncated, info = result
        last = next((info[key] for key in FINAL if key in info), None)
        ends = self._flags(terminated, "terminated"), self._flags(truncated, "truncated")
        return Step(
            mapped(_copied, observation),
            self._vector(reward, "its reward").clone(),
            *ends,
            None if last is None else mapped(partial(self._merged, ends[0] | ends[1]), observation, last),
            self._numbers(info, ends[0] | ends[1]),
        )

    def _numbers(self, info: Mapping[str, Any], ended: Tensor) -> dict[str, Tensor]:
        """The tensors of an info; in the rows of `ended` episodes [N] those of `final_info`, if there is one."""
        numbers = {name: value for name, value in info.items() if isinstance(value, Tensor)}
        final = info.get("final_info")
        for name, value in final.items() if isinstance(final, Mapping) else ():
            if isinstance(value, Tensor):
                running = numbers.get(name)
                if running is not None and running.shape == value.shape == ended.shape:
                    value = value.where(ended, running)
                numbers[name] = value
        return numbers

    def picture(self) -> Any:
        picture = self.env.render()
        picture = picture[0] if isinstance(picture, list | tuple) else picture
        if isinstance(picture, Tensor):
            picture = picture.numpy(force=True)
        return picture[0] if getattr(picture, "ndim", 0) == 4 else picture

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def _vector(self, value: Any, what: str) -> Tensor:
        """A tensor [N] of a step. Raises UserError for anything else."""
        if isinstance(value, Tensor) and value.shape == (self.copies,):
            if value.device.type != self.device.type:
                raise UserError(
                    f"environment.id: {self._id} gives {what} on {value.device}; the run's device is {self.device}"
                )
            return value
        has = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"as {type(value).__name__}"
        raise UserError(f"environment.id: {self._id} gives {what} {has}; it must be a torch tensor [{self.copies}]")

    def _flags(self, value: Any, what: str) -> Tensor:
        # Copied because vector environments may reuse their tensors.
        return self._vector(value, what).bool().clone()

    def _merged(self, ended: Tensor, observation: Any, last: Any) -> Tensor:
        """The last observations where an episode ended, elsewhere the current ones."""
        if not isinstance(last, Tensor) or last.shape != observation.shape:
            has = f"of shape {list(last.shape)}" if isinstance(last, Tensor) else f"as {type(last).__name__}"
            raise UserError(
                f"environment.id: {self._id} gives last observations {has}; they must be a tensor of the shape of all "
                f"observations, {list(observation.shape)}, of which the rows of ended episodes are read"
            )
        return torch.where(ended.view(-1, *[1] * (last.dim() - 1)), last, observation)


def _copied(observation: Any) -> Any:
    return observation.clone() if isinstance(observation, Tensor) else observation
