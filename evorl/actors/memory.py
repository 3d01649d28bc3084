"""Anonymous shared memory: the system frees it when the last process that uses it has ended."""

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
"""Alignment of tensors in bytes: one cache line."""


class SharedMemory:
    """Shared memory behind a file descriptor that can be passed to another process. It grows and never shrinks."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Attach to existing memory by its `descriptor`, or create new memory."""
        self.descriptor = _new() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def grow(self, size: int) -> None:
        """Grow to at least `size` bytes."""
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def arena(self, offset: int = 0) -> Arena:
        """Return an arena over all of the current memory from byte `offset` on."""
        size = os.fstat(self.descriptor).st_size
        # An older map stays alive for as long as a tensor uses it.
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.descriptor, size)
        return Arena(self._map, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class Arena:
    """Allocates tensors one after the other. Without memory it only counts the bytes (`used`) they would take."""

    def __init__(self, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        self._memory = memory
        self.used = offset

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor at the next free aligned offset; its values are the memory's current contents."""
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
