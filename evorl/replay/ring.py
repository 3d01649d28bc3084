"""Ring-buffer memory of a storage, and reads by slot.

Axes: T rows of the ring; N streams; B batch; F frames of a stack; L places for true last observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from evorl.replay.frame_stacks import stack_places
from evorl.replay.slots import Integers, LastPlaces
from evorl.types import Tensors

Field = tuple[tuple[int, ...], torch.dtype]
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates an uninitialised tensor of a shape and dtype."""


class Kept(Protocol):
    """Shape and dtype of an observation part, and the number of stacked frames on its first axis (0: no stack)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def frames(self) -> int: ...


def deepest(observation: Mapping[str, Kept]) -> int:
    """Return the depth of the deepest frame stack, or 1 if nothing is stacked."""
    return max([1, *(part.frames for part in observation.values())])


def link_type(slots: int) -> torch.dtype:
    """Return the smallest integer dtype that can index a storage of so many slots."""
    return torch.int32 if 2 * slots + 1 < 2**31 else torch.int64


def places_at_first(rows: int, streams: int, depth: int) -> int:
    """Return the initial number of places for true last observations."""
    # With stacks, an environment that spends a step on a reset leaves its last observation in the ring.
    return max(streams, rows * streams // 32) if depth == 1 else 0


def memory_at_first(rows: int, streams: int, observation: Mapping[str, Kept], columns: Mapping[str, Field]) -> int:
    """Return the initial size in bytes of a storage with next observations, without allocating it."""
    depth = deepest(observation)
    slots = (rows + depth) * streams
    shapes = [(part.shape[1:] if part.frames else part.shape, part.dtype) for part in observation.values()]
    seen, kept = (
        sum(math.prod(shape) * dtype.itemsize for shape, dtype in each) for each in (shapes, columns.values())
    )
    flags = 3 if depth > 1 else 2
    places = slots + 1 + places_at_first(rows, streams, depth)
    return places * seen + slots * (kept + flags + link_type(slots).itemsize)


class Found(NamedTuple):
    """Gathered observation parts, next observation parts and columns, each [..., ...]."""

    observation: Tensors
    next_observation: Tensors
    columns: Tensors


class Ring:
    """Preallocated tensors over T rows of N streams; slot t * N + n is row t of stream n.

    Each observation part has one tensor: T * N places for the slots' observations, one of zeros, and L for true last
    observations. `links` holds the place of each slot's next observation.
    """

    def __init__(
        self,
        rows: int,
        streams: int,
        observation: Mapping[str, Kept],
        columns: Mapping[str, Field],
        device: torch.device,
        store_next: bool,
        empty: Empty | None,
        last: int | None,
    ) -> None:
        """Allocate `rows` steps, plus the rows before and after that their observations need.

        With `last`, L is fixed; otherwise it grows.
        """
        self.rows, self.streams, self.device = rows, streams, device
        self.store_next = store_next
        self.parts = dict(observation)
        self.fields = dict(columns)
        self.depth = deepest(self.parts)
        """F: the depth of the deepest frame stack."""
        self.ring = rows + self.depth
        """T: the kept rows, one for the latest observation, and F - 1 for older frames."""
        self.slots = self.ring * streams
        self.written = 0
        """Total number of rows written."""
        self._empty = empty or partial(_zeros, device)
        self.columns = {
            name: self._empty((self.ring, streams, *shape), dtype) for name, (shape, dtype) in columns.items()
        }
        flags = {"valid": torch.bool, "boundary": torch.bool} | ({"age": torch.uint8} if self.depth > 1 else {})
        self.flags = {name: self._empty((self.ring, streams), dtype).zero_() for name, dtype in flags.items()}
        """`valid`; `boundary`: the next row does not continue this one; `age`: earlier frames available to a row."""
        self._flat = {name: values.flatten(0, 1) for name, values in (self.columns | self.flags).items()}
        self.links = self._empty((self.slots if store_next else 0,), link_type(self.slots))
        self.links[:] = torch.arange(streams, streams + len(self.links), device=device)
        self.links[-streams:] %= self.slots
        self.seen: Tensors = {}
        """Observation parts [T, N, ...]; of stacks only the newest frame."""
        self._data: Tensors = {}
        last = places_at_first(rows, streams, self.depth) if last is None else last
        self.last = LastPlaces(last if store_next else 0)
        self._take_memory()

    @property
    def memory(self) -> int:
        """The allocated size in bytes."""
        tensors = [*self._data.values(), *self.columns.values(), *self.flags.values(), self.links]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def newest_row(self) -> int:
        """The ring index of the latest row."""
        return (self.written - 1) % self.ring

    def window(self, start_row: int, steps: int) -> Tensors:
        """Return views [T, N, ...] of `steps` rows of the ring, without stacked parts.

        The views are columns, `observation.` parts and the flags `valid` and `boundary` (the next row does not continue
        this one). Raises ValueError if the window is not contiguous.
        """
        if not 0 <= start_row <= self.ring - steps:
            raise ValueError(f"{steps} rows from row {start_row} do not lie in one piece of {self.ring} rows")
        rows = slice(start_row, start_row + steps)
        shown = {f"observation.{name}": self.seen[name] for name, part in self.parts.items() if not part.frames}
        flags = {name: self.flags[name] for name in ("valid", "boundary")}
        return {name: values[rows] for name, values in (shown | self.columns | flags).items()}

    def gather(self, slots: Tensor, names: Iterable[str] | None = None) -> Found:
        """Gather transitions at `slots` [...], with the columns and flags in `names`, or all columns."""
        flat, shape = slots.reshape(-1), slots.shape
        columns = self.gather_columns(slots, self.columns if names is None else names)
        seen: Tensors = {}
        following: Tensors = {}
        if self.store_next:
            links = self.links.index_select(0, flat)
        for name, part in self.parts.items():
            data = self._data[name]
            if not part.frames:
                seen[name] = _shaped(data.index_select(0, flat), shape)
                if self.store_next:
                    following[name] = _shaped(data.index_select(0, links), shape)
                continue
            places = self._stack_places(flat, part.frames)
            if self.store_next:
                # The two stacks share all frames but one each: gather once and return two views of the same memory.
                places = torch.cat([places, links.unsqueeze(-1)], -1)
            frames = data.index_select(0, places.flatten()).view(*places.shape, *data.shape[1:])
            seen[name] = _shaped(frames[:, : part.frames], shape)
            if self.store_next:
                following[name] = _shaped(frames[:, 1:], shape)
        return Found(seen, following, columns)

    def gather_columns(self, slots: Tensor, names: Iterable[str]) -> Tensors:
        """Gather the named columns and flags [..., ...] at `slots` [...]."""
        flat, shape = slots.reshape(-1), slots.shape
        return {name: _shaped(self._flat[name].index_select(0, flat), shape) for name in names}

    def observation(self, slots: Tensor) -> Tensors:
        """Gather the observations [..., ...] at `slots` [...]."""
        flat, seen = slots.reshape(-1), {}
        for name, part in self.parts.items():
            places = self._stack_places(flat, part.frames) if part.frames else flat
            values = self._data[name].index_select(0, places.flatten())
            seen[name] = values.view((*slots.shape, *part.shape))
        return seen

    def next_observation(self, slots: Tensor) -> Tensors:
        """Gather the next observations [..., ...] at `slots` [...], including true last observations of episodes."""
        flat, seen = slots.reshape(-1), {}
        following = self.links.index_select(0, flat).unsqueeze(-1)
        for name, part in self.parts.items():
            # The next stack is this one without its oldest frame, plus one new frame.
            places = torch.cat([self._stack_places(flat, part.frames - 1), following], -1) if part.frames else following
            values = self._data[name].index_select(0, places.flatten())
            seen[name] = values.view((*slots.shape, *part.shape))
        return seen

    def following(self, slots: Tensor, steps: Tensor | int) -> Tensor:
        """Return the slots [...] `steps` [...] later in the same streams."""
        return (slots + steps * self.streams) % self.slots

    def window_end(self, slots: Tensor, n: int) -> Tensor:
        """Return the number of consecutive steps [...] from `slots` [...] on, including the first, at most `n`."""
        later = self.following(slots.unsqueeze(-1), torch.arange(n, device=self.device))
        cut = self.flags["boundary"].view(-1).index_select(0, later.view(-1)).view(later.shape)
        cut[..., -1] = True
        until_newest = (self.newest_row - slots // self.streams) % self.ring
        # argmax returns the first of several equal maxima.
        return torch.minimum(cut.byte().argmax(-1), until_newest) + 1

    def last_observations(self) -> tuple[Tensors, Tensor]:
        """Return all true last observations, parts [L, ...] with one frame per stack, and their slots [L]."""
        places = self._tensor(self.last.places() + self.slots + 1)
        parts = {name: data.index_select(0, places) for name, data in self._data.items()}
        return parts, self._tensor(self.last.numbers(self.streams) % self.slots)

    def keep_last(self, row: int, streams: Integers, parts: Mapping[str, Tensor]) -> None:
        """Save true last observations, parts [B, ...] with one frame per stack, of `streams` [B] of a row."""
        if self.last.held + len(streams) > self.last.size:
            self._enlarge(max(2 * self.last.size, self.last.held + len(streams)))
        places = self._tensor(self.last.append(row, streams) + self.slots + 1)
        for name, data in self._data.items():
            data[places] = parts[name].to(self.device)
        self.links[self._tensor(row % self.ring * self.streams + streams)] = places.to(self.links.dtype)

    def forget_last(self, oldest: int) -> None:
        """Release the true last observations of rows before `oldest`."""
        for row, streams in self.last.drop(oldest):
            slots = self._tensor(row % self.ring * self.streams + streams)
            self.links[slots] = self.following(slots, 1).to(self.links.dtype)

    def _enlarge(self, size: int) -> None:
        """Grow to `size` true last observations; parts are copied one at a time, as old and new must coexist."""
        kept, slots = self.last_observations()
        self.last.enlarge(size)
        self._take_memory()
        for name, values in kept.items():
            self._data[name][self.slots + 1 : self.slots + 1 + len(values)] = values
        self.links[slots] = torch.arange(len(slots), device=self.device).to(self.links.dtype) + self.slots + 1

    def _take_memory(self) -> None:
        """Allocate observation memory and copy existing observations into it."""
        for name, part in self.parts.items():
            shape = part.shape[1:] if part.frames else part.shape
            data = self._empty((self.slots + 1 + self.last.size, *shape), part.dtype)
            if name in self._data:
                data[: self.slots] = self._data[name][: self.slots]
            data[self.slots] = 0
            self._data[name] = data
            self.seen[name] = data[: self.slots].view(self.ring, self.streams, *shape)

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _stack_places(self, slots: Tensor, frames: int) -> Tensor:
        """Return the places [B, F] of the newest `frames` frames of the stacks at `slots` [B]."""
        if self.depth == 1:
            return slots.unsqueeze(-1)[:, :frames]
        return stack_places(slots, self.flags["age"].view(-1)[slots], frames, self.streams, self.slots)


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _shaped(values: Tensor, shape: torch.Size) -> Tensor:
    """Reshape values [B, ...] to [*shape, ...]."""
    return values.view((*shape, *values.shape[1:]))
