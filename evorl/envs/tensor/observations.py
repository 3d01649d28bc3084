"""Observations and actions of a simulator as the tensors that agents see and give. Axes: N copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from evorl.config import Environment
from evorl.envs.reading import ObservationReader
from evorl.envs.spaces import LARGEST, choices, float_bounds, parts_of
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors


class TensorReader:
    """Converts nested observations [N, ...] into named tensors as `parts` specifies, and notes impossible numbers."""

    def __init__(self, settings: Environment, space: gym.Space[Any]) -> None:
        """Raises UserError if a part has no encoder or the settings do not fit the space."""
        self._space, self._id = space, settings.id
        indices = settings.observation_indices
        self._indices = None if indices is None else list(indices)
        self.parts = ObservationReader(settings, space, str, 0).parts
        self._peaks: dict[str, Tensor] = {}
        self._highest: dict[str, Tensor] = {}
        self._outside: dict[str, Tensor] = {}

    def read(self, observation: Any) -> Tensors:
        """The parts [N, ...] of observations. Raises UserError for another structure, shape or type."""
        parts = {}
        for name, (value, space) in leaves(self._space, observation, self._id).items():
            part = self.parts[name]
            shape = tuple(space.shape or ())
            if tuple(value.shape[1:]) != shape:
                raise UserError(
                    f"environment.id: {self._id} gives part {name!r} of the observation with the shape "
                    f"{list(value.shape)}; its observation_space has {['N', *shape]}".replace("'N'", "N")
                )
            if value.is_floating_point() and not part.dtype.is_floating_point:
                raise UserError(
                    f"environment.id: {self._id} gives part {name!r} of the observation in {value.dtype}, which does "
                    f"not fit its observation_space of {space.dtype}"
                )
            if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete) and np.any(space.start):
                value = value - torch.as_tensor(space.start, device=value.device)
            if part.sizes or (value.dtype != part.dtype and part.dtype == torch.uint8):
                value = self._inside(name, value, part.sizes)
            value = value.to(part.dtype)
            if self._indices is not None:
                value = value[..., self._indices]
            if part.dtype == torch.float32:
                self.note(f"part {name!r} of the observation", value)
            parts[name] = value
        return parts

    def _inside(self, name: str, value: Tensor, sizes: Sequence[int]) -> Tensor:
        """Whole numbers [N, ...] that neither wrap around nor index beyond a category, until `check` refuses them."""
        if name not in self._highest:
            highest = torch.tensor(sizes or 256, device=value.device) - 1
            self._highest[name] = highest.view(value.shape[1:] if sizes else ())
        inside = torch.minimum(value.clamp(min=0), self._highest[name])
        outside = (inside != value).any()
        before = self._outside.get(name)
        self._outside[name] = outside if before is None else before | outside
        return inside

    def note(self, what: str, value: Tensor) -> None:
        """Note the largest size of numbers, on the device; NaN is larger than any."""
        peak = value.abs().amax()
        before = self._peaks.get(what)
        self._peaks[what] = peak if before is None else torch.maximum(before, peak)

    def check(self) -> None:
        """Raise UserError if any number noted since the last call was not finite, or too large; reads the device.

        What was noted is forgotten only if all is well: an interim checkpoint that fails for it does not end a run.
        """
        for name, flag in self._outside.items():
            if flag:
                raise UserError(
                    f"environment.id: {self._id} gave numbers in part {name!r} of the observation that are not in its "
                    f"observation_space; that has 0 to {[size - 1 for size in self.parts[name].sizes] or 255} (before "
                    "a `start` is added)"
                )
        peaks = [peak.float() for peak in self._peaks.values()]
        for what, peak in zip(self._peaks, torch.stack(peaks).tolist() if peaks else [], strict=True):
            if not peak < LARGEST:
                raise UserError(
                    f"environment.id: {self._id} gave {peak:.3g} as {what}; rewards, observations and what an info "
                    f"reports must be finite in single precision, and of a size below {LARGEST:.2g}"
                )
        self._peaks, self._outside = {}, {}


def leaves(space: gym.Space[Any], observation: Any, id: str) -> dict[str, tuple[Tensor, gym.Space[Any]]]:
    """The tensors of a nested observation with their spaces, by the names of its parts."""
    try:
        tensors = {name: (value, inner) for name, value, inner in parts_of(space, observation)}
    except KeyError as error:
        raise UserError(f"environment.id: {id} gives no part {error} of its observation_space") from error
    for value, _ in tensors.values():
        if not isinstance(value, Tensor):
            raise UserError(
                f"environment.id: {id} gives observations as {type(value).__name__}; a simulator gives torch tensors"
            )
    return tensors


def action_converter(space: gym.Space[Any], device: torch.device) -> Callable[[Tensor], Tensor]:
    """The function that maps agents' actions [N, ...] into an action space, without reading them on the host.

    Raises UserError for a space in which no algorithm acts.
    """
    if isinstance(space, gym.spaces.Box):
        dtype = torch.as_tensor(np.zeros((), space.dtype)).dtype
        low, high = (torch.from_numpy(bound).to(device) for bound in float_bounds(space))
        whole = not dtype.is_floating_point
        if not whole:
            low, high = low.to(dtype), high.to(dtype)

        def bounded(action: Tensor) -> Tensor:
            # A diverged agent is stopped at its next update; until then NaN actions must not reach the simulator.
            action = action.nan_to_num(0.0, float("inf"), float("-inf"))
            action = action.double().round() if whole else action.to(dtype)
            return torch.minimum(torch.maximum(action, low), high).to(dtype)

        return bounded
    if not choices(space):
        raise UserError(f"environment.id: no algorithm acts in {space}")
    start = torch.as_tensor(np.asarray(space.start), device=device)  # type: ignore[attr-defined]
    return (lambda action: action) if not start.any() else (lambda action: action + start)
