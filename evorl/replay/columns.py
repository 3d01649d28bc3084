"""What a rollout keeps of one quantity. Axes: T steps, P agents, E environments, N rows of (t * P + p) * E + e."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Column(Protocol):
    """The values of one quantity at every step of a rollout."""

    def write(self, step: int, value: Tensor, started: Tensor) -> None:
        """Keep the values [P, E, ...] of a step; `started` [P, E] says where an episode has just begun."""

    def whole(self) -> Tensor:
        """All values [T, P, E, ...]."""

    def gather(self, rows: Tensor) -> Tensor:
        """The values [..., ...] of rows [...]."""


class PlainColumn:
    """Keeps values as they are, in memory that is taken at the first step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._values: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor) -> PlainColumn:
        """A column of values [T, P, E, ...] that are there already."""
        column = cls(len(values))
        column._values = values
        return column

    def write(self, step: int, value: Tensor, started: Tensor) -> None:
        if self._values is None or self._values.shape[1:] != value.shape:
            self._values = torch.zeros((self._steps, *value.shape), dtype=value.dtype, device=value.device)
        self._values[step] = value

    def whole(self) -> Tensor:
        assert self._values is not None
        return self._values

    def gather(self, rows: Tensor) -> Tensor:
        values = self.whole()
        return values.flatten(0, 2).index_select(0, rows.flatten()).view(*rows.shape, *values.shape[3:])


class FrameColumn:
    """Keeps each frame of stacks of F successive frames once, and puts the stacks together when they are read.

    Stacks are [P, E, F, rows, columns], the newest frame last; an episode starts with zeros before its first frame.
    The first F frames kept are the stack of the first step, step t adds frame t + F - 1.
    """

    def __init__(self, steps: int, count: int) -> None:
        self._steps = steps
        self._count = count
        self._frames: Tensor | None = None
        self._first: Tensor
        """For each step the oldest frame [T, P, E] that shows the same episode."""

    def write(self, step: int, value: Tensor, started: Tensor) -> None:
        if self._frames is None:
            shape = (self._steps + self._count - 1, *value.shape[:2], *value.shape[3:])
            self._frames = torch.zeros(shape, dtype=value.dtype, device=value.device)
            self._first = torch.zeros((self._steps, *value.shape[:2]), dtype=torch.int64, device=value.device)
        if step == 0:
            self._frames[: self._count] = value.movedim(2, 0)
            self._first[0] = 0
            return
        newest = step + self._count - 1
        self._frames[newest] = value[:, :, -1]
        self._first[step] = torch.where(started, newest, self._first[step - 1])

    def whole(self) -> Tensor:
        agents, envs = self._first.shape[1:]
        rows = torch.arange(self._steps * agents * envs, device=self._first.device)
        return self.gather(rows.view(self._steps, agents, envs))

    def gather(self, rows: Tensor) -> Tensor:
        assert self._frames is not None
        columns = self._first[0].numel()
        place = rows // columns
        frames = place.unsqueeze(-1) + torch.arange(self._count, device=rows.device)
        flat = (frames * columns + (rows % columns).unsqueeze(-1)).flatten()
        stacks = self._frames.flatten(0, 2).index_select(0, flat)
        before = (frames < self._first.flatten()[rows].unsqueeze(-1)).flatten()
        if before.any():
            stacks[before] = 0
        return stacks.view(*rows.shape, self._count, *stacks.shape[1:])
