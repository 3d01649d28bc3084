"""Checks of what an environment returns: errors of one line that name it, before anything is stacked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.passive_env_checker import check_action_space, check_observation_space
from gymnasium.vector import AutoresetMode

from evorl.envs.reading import flat_mask
from evorl.envs.spaces import MASK, parts_of
from evorl.types.messages import message_of, shown
from evorl.types.outcomes import UserError


def check_spaces(observation_space: Any, action_space: Any, id: str) -> None:
    """Raise UserError unless an environment has both spaces, and Gymnasium's checks accept them."""
    for name, space, check in (
        ("action_space", action_space, check_action_space),
        ("observation_space", observation_space, check_observation_space),
    ):
        if not isinstance(space, gym.Space):
            has = f"has no {name}" if space is None else f"has {shown(space)} as its {name}"
            raise UserError(f"environment.id: {id} {has}; set it to a space, such as gymnasium.spaces.Discrete(2)")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(space)
        except AssertionError as error:
            raise UserError(f"environment.id: the {name} of {id}: {message_of(error)}") from error
        if 0 in (space.shape or ()):
            raise UserError(f"environment.id: the {name} of {id} is {space}, which holds no numbers")


def check_start(start: Any, space: gym.Space[Any], id: str) -> None:
    """Raise UserError unless a reset returned an observation of this space and an info."""
    if not isinstance(start, tuple) or len(start) != 2 or not isinstance(start[1], Mapping):
        raise UserError(
            f"environment.id: the reset of {id} returns {_described(start)}; it must return a pair (observation, "
            "info), where info is a dictionary"
        )
    check_observation(start[0], space, f"environment.id: the reset of {id} returns")


def check_step(step: Any, space: gym.Space[Any], id: str) -> None:
    """Raise UserError unless a step returned five values: an observation of this space, a number, ends, an info."""
    if not isinstance(step, tuple) or len(step) != 5 or not isinstance(step[4], Mapping):
        raise UserError(
            f"environment.id: the step of {id} returns {_described(step)}; it must return 5 values (observation, "
            "reward, terminated, truncated, info), where info is a dictionary"
        )
    reward = np.asarray(step[1])
    if reward.ndim or reward.dtype.kind not in "biuf":
        raise UserError(
            f"environment.id: the step of {id} returns {_described(step[1])} as its reward; it must return a number"
        )
    check_observation(step[0], space, f"environment.id: the step of {id} returns")


def check_observation(observation: Any, space: gym.Space[Any], begin: str) -> None:
    """Raise UserError, with a message that begins so, if an observation lacks a part or has another shape or type.

    Its values are checked where they are read: an observation may leave the bounds of its space.
    """
    try:
        for name, value, inner in parts_of(space, observation):
            where = "the observation" if inner is space else f"part {name!r} of the observation"
            _check_array(value, inner, f"{begin} {where}")
    except KeyError as error:
        raise UserError(f"{begin} no part {error} of the observation, which its observation_space has") from error


def _check_array(observation: Any, space: gym.Space[Any], begin: str) -> None:
    """Raise UserError, with a message that begins so, for numbers of another shape, or of a type that does not fit."""
    if space.shape is None or space.dtype is None or isinstance(space, gym.spaces.Text):
        return
    try:
        array = np.asarray(observation)
    except ValueError:  # A list of lists of different lengths.
        array = np.asarray(None)
    if array.dtype == object or array.shape != space.shape:
        has = f"of shape {list(array.shape)}" if array.dtype != object else f"as {_described(observation)}"
        raise UserError(f"{begin} {has}; its observation_space has shape {list(space.shape)}")
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise UserError(f"{begin} in {array.dtype}, which does not fit its observation_space of {space.dtype}")


def _described(value: Any) -> str:
    """A returned value by its type, and by those of its parts if it is a tuple."""
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)}"
    return "None" if value is None else f"{shown(value)} of type {type(value).__name__}"


def batchable(info: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an info as floats, and the action mask as one flat array; nothing reads the rest.

    Gymnasium gives a key's array the type that the first copy reports. That truncates 0.7 to 0 after an int, raises for
    a string or an array of another length, and turns a mask that is not an array into an array of objects. Conversion
    takes 2 of the 44 microseconds of a HalfCheetah step, and nothing where an info is empty.
    """
    numbers: dict[str, Any] = {}
    for key, value in info.items():
        if key == MASK:
            numbers[key] = flat_mask(value)
        elif isinstance(value, Mapping):
            numbers[key] = batchable(value)
        elif isinstance(value, int | float | np.bool_ | np.number):
            numbers[key] = float(value)
        elif isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
            numbers[key] = float(value.item())
    return numbers


DECLARED = (
    'declare it where the environment is made: `env.metadata = {**env.metadata, "autoreset_mode": '
    "AutoresetMode.SAME_STEP}` if a step that ends an episode returns the first observation of the next, as in Isaac "
    "Lab, ManiSkill and mjlab, or AutoresetMode.NEXT_STEP if the step after it does"
)


def reset_mode(env: Any, id: str) -> AutoresetMode:
    """The reset mode that a vector environment declares. Raises UserError if it does not say, or never does."""
    # The attribute comes first: all Atari environments share one `metadata`, with the mode of the one made last.
    metadata = getattr(env, "metadata", None) or {}
    declared = getattr(env, "autoreset_mode", metadata.get("autoreset_mode"))
    if declared is None:
        raise UserError(f"environment.id: {id} does not say when it resets; {DECLARED}")
    names = {mode: mode for mode in AutoresetMode} | {mode.value: mode for mode in AutoresetMode}
    mode = names.get(declared)
    if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        raise UserError(f"environment.id: {id} declares autoreset mode {shown(declared)}; {DECLARED}")
    return mode
