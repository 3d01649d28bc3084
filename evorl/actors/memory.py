"""Memory that processes share without a name, so that nothing is left of it when the last of them has ended."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

PAGE = 4096
ALIGNMENT = 64
"""Bytes to which tensors are aligned: a line of the cache."""


class SharedMemory:
    """Memory behind a descriptor, which another process can be given. It grows and never shrinks."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Take over memory that is there, by its `descriptor`, or new memory."""
        self.descriptor = _new() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def grow(self, size: int) -> None:
        """Make it at least so many bytes."""
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def arena(self, offset: int = 0) -> Arena:
        """Return where tensors can be placed one after the other, from byte `offset` on, in all that is there now."""
        size = os.fstat(self.descriptor).st_size
        # An older map lives on for as long as a tensor uses it.
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.descriptor, size)
        return Arena(self._map, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class Arena:
    """Places tensors one after the other. Without memory it only counts the bytes (`used`) that they would take."""

    def __init__(self, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        self._memory = memory
        self.used = offset

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape and type at the next free place; it holds what is there."""
        numel = math.prod(shape)
        first = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = first + numel * dtype.itemsize
        if self._memory is None or not numel:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=first).view(shape)


def _new() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("evorl", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp()
    Path(path).unlink()
    return descriptor
