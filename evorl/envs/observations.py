"""Splits the observations of a vector environment into stored parts. Axes: N environment copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.masks import MASK
from evorl.envs.spec import ObservationSpecs, observation_specs, split
from evorl.envs.vector import stacked_frames
from evorl.envs.watch import Watch
from evorl.types import UserError

TYPES = {torch.uint8: np.uint8, torch.int64: np.int64, torch.float32: np.float32}


class ObservationReader:
    """Converts batched observations of one space into named arrays, as specified by `parts`."""

    def __init__(self, settings: Environment, space: gym.Space[Any], watch: Watch, frames: int | None = None) -> None:
        """Determine the parts; `frames` are stacked on the first axis, None derives their number from the settings.

        Raises UserError if a part has no encoder or the settings do not fit the space.
        """
        self._space = space
        self._watch = watch
        self._indices = None if settings.observation_indices is None else list(settings.observation_indices)
        chosen = space if self._indices is None else _picked(space, self._indices, settings.id)
        self.parts: ObservationSpecs = _specs(settings, chosen, stacked_frames(settings) if frames is None else frames)
        self._types = {name: TYPES[part.dtype] for name, part in self.parts.items()}

    def read(self, observation: Any, copy: int | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of the parts [N, ...] of batched observations, or [...] of one `copy`'s final observation.

        They are copied because vector environments may reuse the returned array, and some return it transposed. Raises
        UserError for non-finite values and for categories out of range.
        """
        parts = split(self._space, observation)
        if self._indices is not None:
            parts = {name: array[..., self._indices] for name, array in parts.items()}
        read = {name: np.array(array, dtype=self._types[name], order="C") for name, array in parts.items()}
        which = "the observation" if copy is None else "the last observation"
        for name, array in read.items():
            if array.dtype == np.float32:
                self._watch.check_finite(array, f"in part {name!r} of {which}", copy)
            elif sizes := self.parts[name].sizes:
                self._watch.check_choices(array, sizes, f"in part {name!r} of {which}", copy)
        return read


def _specs(settings: Environment, space: gym.Space[Any], frames: int) -> ObservationSpecs:
    """Return the observation specs of a space, with image channels and frames from the settings."""
    parts = observation_specs(space)
    if MASK in parts:
        raise UserError(f"environment.id: {settings.id} has an observation part named {MASK!r}")
    if frames:
        if settings.image_channels == "last":
            raise UserError(f"environment.image_channels: {settings.id} stacks frames on the first axis; take 'first'")
        return {name: replace(part, frames=frames, channels_last=False) for name, part in parts.items()}
    if settings.image_channels == "auto":
        return parts
    last = settings.image_channels == "last"
    return {
        name: replace(part, channels_last=last) if part.kind == "image" and len(part.shape) == 3 else part
        for name, part in parts.items()
    }


def _picked(space: gym.Space[Any], indices: list[int], id: str) -> gym.Space[Any]:
    """Return the space of selected vector components. Raises UserError for a non-vector or an index out of range."""
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        raise UserError(f"environment.observation_indices: these are of a vector; {id} shows {space}")
    if max(indices) >= space.shape[0]:
        last = space.shape[0] - 1
        raise UserError(f"environment.observation_indices: there is no number {max(indices)}; {id} shows 0 to {last}")
    return gym.spaces.Box(space.low[indices], space.high[indices], dtype=space.dtype.type)
