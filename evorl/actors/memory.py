"""Anonymous shared memory, and the board on which a learner publishes its policy to its actors.

The system frees the memory when the last process that uses it has ended. A board begins with a header on pages of its
own; two parameter buffers and a description of the agents follow.
Axes: P agents, S numbers of an agent's acting state, D all parameters.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.system.formats import DESCRIPTIONS
from evorl.types.agents import Agent

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
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def arena(self, offset: int = 0) -> Arena:
        """An arena over all of the current memory from byte `offset` on."""
        size = os.fstat(self.descriptor).st_size
        # An older map stays alive for as long as a tensor uses it.
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.descriptor, size)
        return Arena(self._map, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class Arena:
    """Allocates tensors one after the other, in the first `used` bytes of the memory.

    Without memory they are ordinary tensors, and `used` says how many bytes of memory they would take.
    """

    def __init__(self, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        self._memory = memory
        self.used = offset

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at the next free aligned offset; its values are the memory's current contents."""
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


class Header(IntEnum):
    """Indices into a board's header."""

    GENERATION = 0
    """The published generation, or 0 while a new one is written."""
    BEGUN = 1
    """The number of writes begun to this generation's buffers."""
    DONE = 2
    """The number of completed writes."""
    FIRST_VERSION = 3
    SECOND_VERSION = 4
    """The versions of the parameters in the two buffers."""
    VALUES = 5
    """The number D of all parameters."""
    AGENTS = 6
    STATES = 7
    DESCRIPTION = 8
    """The length of the description in bytes."""


@dataclass(frozen=True)
class Description:
    """A generation as actors see it: the agents without their tensors, and whether episodes carry over into it."""

    generation: int
    agents: list[Agent]
    carries_over: bool


class Board:
    """Shared memory where a learner publishes parameters with their version, and each actor its heartbeat.

    Two buffers are written in turn. A reader that has copied one checks whether a write to it began meanwhile, and if
    so copies again. No read is torn, and neither side blocks.
    """

    def __init__(self, actors: int, memory: SharedMemory | None = None, lock: int | None = None) -> None:
        """Attach to the `memory` and `lock` of another process's board for as many actors, or create a new board."""
        with ExitStack() as opened:
            self.memory = SharedMemory() if memory is None else memory
            opened.callback(self.memory.close)
            self.lock = _new() if lock is None else lock
            """Descriptor of a file used only for the record lock. A process loses a record lock when it closes any
            descriptor of the file, and each map of the memory holds one. flock(2) could not tell the processes apart,
            since they share one open file description.
            """
            opened.callback(os.close, self.lock)
            self.memory.grow(PAGE + 8 * actors)
            arena = self.memory.arena()
            opened.pop_all()
        self._numbers = arena.empty((len(Header),), torch.int64).numpy()
        self.beats = arena.empty((actors,), torch.float64).numpy()
        """Time of each actor's last step, in seconds of the machine's monotonic clock."""
        self._offset = -(-arena.used // PAGE) * PAGE
        self._flats: list[Tensor] = []
        self._states: list[Tensor] = []
        self._next = 0

    @property
    def generation(self) -> int:
        """The published generation, or 0 while there is none."""
        return int(self._numbers[Header.GENERATION])

    def describe(self, description: Description, values: int, states: int) -> None:
        """Begin a generation whose agents have `values` parameters in total (D) and `states` acting states each (S)."""
        text = json.dumps([agent.describe() for agent in description.agents]).encode()
        self._numbers[Header.GENERATION] = 0
        self._numbers[Header.BEGUN : Header.VALUES] = 0
        self._numbers[Header.VALUES :] = values, len(description.agents), states, len(text) + 1
        counted = Arena(offset=self._offset)
        self._place(counted, self._numbers)
        self.memory.grow(counted.used)
        slot = self._place(self.memory.arena(self._offset), self._numbers)
        slot.copy_(torch.frombuffer(bytearray(text) + bytes([description.carries_over]), dtype=torch.uint8))
        self._next = description.generation

    def publish(self, flat: Tensor, states: Sequence[Tensor], version: int) -> None:
        """Publish parameters [D] and acting states, each [P], as `version`."""
        count = int(self._numbers[Header.DONE]) + 1
        self._numbers[Header.BEGUN] = count
        buffer = count % 2
        self._flats[buffer].copy_(flat)
        for room, values in zip(self._states[buffer], states, strict=True):
            room.copy_(values)
        self._numbers[Header.FIRST_VERSION + buffer] = version
        self._numbers[Header.DONE] = count
        if self._next:
            # Actors may begin a generation only once its first parameters are written.
            self._numbers[Header.GENERATION], self._next = self._next, 0

    def read_description(self) -> Description:
        """Wait for a published generation, map its buffers and return its description."""
        while True:
            numbers = self._numbers.copy()
            generation = int(numbers[Header.GENERATION])
            if generation and generation == self.generation:
                text = self._place(self.memory.arena(self._offset), numbers).numpy().tobytes()
                if generation == self.generation:
                    agents = [Agent(**vars(each)) for each in DESCRIPTIONS.validate_json(text[:-1])]
                    return Description(generation, agents, bool(text[-1]))
            time.sleep(0.001)

    @contextmanager
    def locked(self, look: Callable[[], None]) -> Iterator[None]:
        """Hold the lock against other processes; the system releases it if its holder is killed.

        While another process holds it, `look` is called repeatedly, so that it can kill a hung holder.
        """
        while not self._try_lock():
            look()
            time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.lockf(self.lock, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        self.memory.close()
        os.close(self.lock)

    def empty(self) -> tuple[Tensor, Tensor]:
        """Uninitialised parameters [D] and acting states [S, P] of the generation last described."""
        return torch.empty_like(self._flats[0]), torch.empty_like(self._states[0])

    def fetch(self, flat: Tensor, states: Tensor, generation: int) -> int | None:
        """Copy the newest parameters [D] and acting states [S, P] and return their version.

        Return None if `generation` is over; the outputs may then be partly overwritten.
        """
        while True:
            done = int(self._numbers[Header.DONE])
            buffer = done % 2
            if generation != self.generation:
                return None
            flat.copy_(self._flats[buffer])
            states.copy_(self._states[buffer])
            version = int(self._numbers[Header.FIRST_VERSION + buffer])
            if self._numbers[Header.BEGUN] <= done + 1 and generation == self.generation:
                return version

    def _place(self, arena: Arena, numbers: NDArray[np.int64]) -> Tensor:
        """Lay out both buffers and then the description in an arena; return the description's bytes."""
        values, agents, states, description = map(int, numbers[Header.VALUES :])
        self._states = [arena.empty((states, agents), torch.float64) for _ in range(2)]
        self._flats = [arena.empty((values,), torch.float32) for _ in range(2)]
        return arena.empty((description,), torch.uint8)
