"""Checked conversion between vector environments and networks: observation parts, masks and actions.

Axes: N environment copies, `num_envs` per agent; A actions of all choices concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy as shallow_copy
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.spaces import (
    LARGEST,
    MASK,
    ObservationSpecs,
    allows_each_choice,
    choices,
    float_bounds,
    from_zero,
    observation_specs,
    parts_of,
    to_zero,
)
from evorl.types.outcomes import UserError

CHANNELS_FIRST = ("openspiel:",)
"""Prefixes of the ids of environments whose images are known to be channels-first."""
TYPES = {torch.uint8: np.uint8, torch.int64: np.int64, torch.float32: np.float32}


class Copies:
    """Names N environment copies, `num_envs` per agent, in errors: by agent, index and step of the episode."""

    def __init__(self, id: str, copies: int, num_envs: int) -> None:
        self.id = id
        self.count = copies
        self._num_envs = num_envs
        self.steps = np.zeros(copies, dtype=np.int64)
        """The step [N] that each running episode is at."""

    def source(self, copy: int) -> str:
        """The beginning of an error about what a copy gave."""
        return f"environment.id: {self.names(np.array([copy]))} gave"

    def names(self, copies: NDArray[np.int64]) -> str:
        """Describe these environments by their number and the first one's agent, index and step of the episode."""
        first, others = int(copies[0]), f" and {len(copies) - 1} more" if len(copies) > 1 else ""
        return name_of_copy(self.id, first, self._num_envs, self.steps[first], others)


def name_of_copy(id: str, copy: int, num_envs: int, step: int, others: str = "") -> str:
    """Describe a copy by its agent, its index among that agent's `num_envs`, and the step of its episode."""
    agent, index = divmod(copy, num_envs)
    return f"environment {index} of agent {agent}{others} ({id}, step {step} of the episode)"


Source = Callable[[int], str]
"""The beginning of an error about what a copy, or an observation of a batch, has given."""


def check_finite(
    source: Source, values: NDArray[Any], what: str, copy: int | None = None, below: float = np.inf
) -> None:
    """Raise UserError unless all values [N, ...], or [...] of one `copy`, are finite and of a size `below` this."""
    # Squares cannot cancel, and their sum takes a fifth of the time of an elementwise check. If it overflows, the
    # elementwise check decides.
    if math.isfinite(np.vdot(values, values)):
        return
    fits = np.abs(values) < below
    if fits.all():
        return
    index = [int(number) for number in np.argwhere(~fits)[0]]
    copy, entry = (index[0], index[1:]) if copy is None else (copy, index)
    where = f"{what}, entry {entry}" if entry else what
    limit = f", and observations of a size below {below:.2g}" if below < np.inf else ""
    raise UserError(
        f"{source(copy)} {values[~fits][0]:.3g} {where}; rewards and observations must be finite in single "
        f"precision{limit}"
    )


def check_choices(source: Source, values: NDArray[Any], sizes: Sequence[int], what: str, copy: int | None) -> None:
    """Raise UserError if any of the integers [N, ...], or [...] of one `copy`, is out of its category range."""
    rows = values.reshape(-1, len(sizes))
    outside = ((rows < 0) | (rows >= np.asarray(sizes))).any(1)
    if not outside.any():
        return
    row = int(np.flatnonzero(outside)[0])
    raise UserError(
        f"{source(row if copy is None else copy)} {rows[row].tolist()} {what}; "
        f"its space has 0 to {[size - 1 for size in sizes]} (before its `start` is added)"
    )


class ActionMasks:
    """Reads the action masks of N environment copies, each of which gives one in every reset and step."""

    def __init__(self, space: gym.Space[Any], copies: Copies) -> None:
        self._copies = copies
        self._sizes = choices(space)

    def read(self, info: dict[str, Any], ended: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Read the masks [N, A] of allowed actions.

        Copies [N] that have `ended`, and are reset by their next action whatever it is, may allow none or give no mask.
        Raises UserError for a missing mask or one of a wrong size, and where no action is allowed.
        """
        copies, actions = self._copies.count, sum(self._sizes)
        gives = np.array(info.get(f"_{MASK}", np.full(copies, MASK in info)), dtype=bool)
        missing = ~gives if ended is None else ~gives & ~ended
        if missing.any():
            raise UserError(
                f"environment.id: {self._copies.names(np.flatnonzero(missing))} gave no info['{MASK}'], which an "
                "earlier `reset` gave; give one in every `reset` and `step`, all 1 where every action is allowed"
            )
        if MASK not in info:
            return np.ones((copies, actions), dtype=bool)
        if np.asarray(info[MASK]).dtype == object:
            raise UserError(f"environment.id: {self._copies.id} gives info['{MASK}'] as objects; give one array")
        mask = np.array(info[MASK], dtype=bool).reshape(copies, -1)
        mask |= ~gives[:, None]
        self._check_size(mask.shape[1])
        allowed = allows_each_choice(mask, self._sizes)
        if ended is not None:
            mask[ended & ~allowed] = True
            allowed |= ended
        if not allowed.all():
            raise UserError(
                f"environment.id: {self._copies.names(np.flatnonzero(~allowed))} forbids every action "
                f"(info['{MASK}'] is all zero); at least one must be allowed"
            )
        return np.asarray(mask)

    def last(self, info: dict[str, Any], copy: int) -> NDArray[np.bool_]:
        """Read the mask [A] of one copy's final observation, or a scalar True if it allows every action.

        A mask that forbids every choice in some part of the action counts as allowing every action. Raises UserError
        for a wrong size.
        """
        final = info.get("final_info", {})
        if MASK not in final or not final.get(f"_{MASK}", np.ones(self._copies.count, dtype=bool))[copy]:
            return np.asarray(True)
        mask = np.asarray(final[MASK][copy], dtype=bool).reshape(-1)
        self._check_size(mask.size)
        allowed = allows_each_choice(mask, self._sizes)
        return mask if allowed else np.asarray(True)

    def _check_size(self, size: int) -> None:
        if size != sum(self._sizes):
            raise UserError(
                f"environment.id: {self._copies.id} gives masks of {size} actions; its space has {sum(self._sizes)}"
            )


def flat_mask(mask: Any) -> NDArray[np.bool_]:
    """The action mask of one copy [A], given as an array or as one for each part of the action."""
    parts = mask if isinstance(mask, list | tuple) else [mask]
    flat: NDArray[np.bool_] = np.concatenate([np.ravel(part) for part in parts]).astype(bool)
    return flat


def refuse_late_masks(info: dict[str, Any], id: str) -> None:
    """Raise UserError if an environment that gave no mask in `reset` gives one in `step`."""
    if MASK in info or MASK in info.get("final_info", ()):
        raise UserError(
            f"environment.id: {id} gives info['{MASK}'] in `step` but not in `reset`; it must give "
            "it in both, or an episode's first action is chosen without it"
        )


ActionReader = Callable[[NDArray[Any]], NDArray[Any]]
"""Map policy actions [N, ...] to a new array of actions [N, ...] inside the action space."""


def action_reader(space: gym.Space[Any], num_envs: int) -> ActionReader:
    """The conversion function for an action space; algorithms reject spaces other than Box and discrete ones."""
    if isinstance(space, gym.spaces.Box):
        return _box_reader(space)
    return _choice_reader(space, num_envs) if choices(space) else np.array


def _box_reader(space: gym.spaces.Box) -> ActionReader:
    whole = space.dtype.kind in "iub"
    low, high = float_bounds(space) if whole else (space.low, space.high)

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # A diverged agent is stopped at its next update; until then NaN actions must not crash its environment.
        values = np.where(np.isnan(values), 0.0, values)
        # A float32 action may exceed a bound by a rounding error, and integers beyond their type's would wrap around.
        values = np.rint(values.astype(np.float64)) if whole else values.astype(space.dtype)
        return np.asarray(np.clip(values, low, high).astype(space.dtype))

    return read


def _choice_reader(space: Any, num_envs: int) -> ActionReader:
    """The converter for Discrete and MultiDiscrete; it raises ValueError for an out-of-range action."""
    sizes = np.array(choices(space)).reshape(space.shape)

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # Atari environments hang on an out-of-range action.
        outside = (values < 0) | (values >= sizes)
        if np.count_nonzero(outside):
            wrong = int(outside.nonzero()[0][0])
            raise ValueError(
                f"agent {wrong // num_envs} chose action {values[wrong]} in environment "
                f"{wrong % num_envs}; the space has actions 0 to {(sizes - 1).tolist()}"
            )
        return from_zero(values, space)

    return read


def split(space: gym.Space[Any], observation: Any) -> dict[str, NDArray[Any]]:
    """Split observations [N, ...] of a space, or one [...], into its parts as stored."""
    categories = gym.spaces.Discrete | gym.spaces.MultiDiscrete
    return {
        name: to_zero(value, inner) if isinstance(inner, categories) else np.asarray(value)
        for name, value, inner in parts_of(space, observation)
    }


class ObservationReader:
    """Converts batched observations of one space into named arrays, as specified by `parts`."""

    def __init__(self, settings: Environment, space: gym.Space[Any], source: Source, frames: int) -> None:
        """Determine the parts; in images, `frames` are stacked on the first axis (0: none are).

        Raises UserError if a part has no encoder or the settings do not fit the space.
        """
        self._space = space
        self._source = source
        self._indices = None if settings.observation_indices is None else list(settings.observation_indices)
        chosen = space if self._indices is None else _picked(space, self._indices, settings.id)
        self.parts: ObservationSpecs = _specs(settings, chosen, frames)
        self._types = {name: TYPES[part.dtype] for name, part in self.parts.items()}

    def within(self, space: gym.Space[Any]) -> ObservationReader:
        """The reader of observations that have only the entries of this `space`."""
        reader = shallow_copy(self)
        reader._space = space
        return reader

    def read(self, observation: Any, copy: int | None = None, what: str = "the observation") -> dict[str, NDArray[Any]]:
        """Copies of the parts [N, ...] of batched observations, or [...] of that of one `copy`.

        They are copied because vector environments may reuse the returned array, and some return it transposed. Raises
        UserError for values that are not finite or too large, and for categories out of range.
        """
        parts = split(self._space, observation)
        if self._indices is not None:
            parts = {name: array[..., self._indices] for name, array in parts.items()}
        read = {name: np.array(array, dtype=self._types[name], order="C") for name, array in parts.items()}
        for name, array in read.items():
            if array.dtype == np.float32:
                check_finite(self._source, array, f"in part {name!r} of {what}", copy, LARGEST)
            elif sizes := self.parts[name].sizes:
                check_choices(self._source, array, sizes, f"in part {name!r} of {what}", copy)
        return read


def _specs(settings: Environment, space: gym.Space[Any], frames: int) -> ObservationSpecs:
    """The observation specs of a space, whose `frames` and first axes are channels where the environment says so."""
    parts = observation_specs(space)
    if MASK in parts:
        raise UserError(
            f"environment.id: {settings.id} has an observation part named {MASK!r}; return it in info[{MASK!r}]"
        )
    if frames:
        return {name: replace(part, frames=frames, channels_last=False) for name, part in parts.items()}
    if not settings.id.startswith(CHANNELS_FIRST):
        return parts
    return {name: replace(part, channels_last=False) if len(part.shape) == 3 else part for name, part in parts.items()}


def _picked(space: gym.Space[Any], indices: list[int], id: str) -> gym.Space[Any]:
    """The space of selected vector components. Raises UserError for a non-vector or an index out of range."""
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        raise UserError(f"environment.observation_indices: they select entries of a vector; {id} has {space}")
    if max(indices) >= space.shape[0]:
        last = space.shape[0] - 1
        raise UserError(f"environment.observation_indices: index {max(indices)} is out of range; {id} has 0 to {last}")
    return gym.spaces.Box(space.low[indices], space.high[indices], dtype=space.dtype.type)
