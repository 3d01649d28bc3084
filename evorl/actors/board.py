"""The learner's policy as its actors read it. Axes: P agents, S numbers of an agent's acting state, D all parameters.

In the first page stand numbers of known places, behind it two buffers of parameters and a description of the agents.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.actors.memory import PAGE, Arena, SharedMemory
from evorl.system.formats import DESCRIPTIONS
from evorl.types import Agent

NUMBERS = ("generation", "begun", "done", "version 0", "version 1", "values", "agents", "states", "description")
"""`generation` is 0 while a new one is written; `begun` and `done` count the buffers that were written in it."""


@dataclass(frozen=True)
class Description:
    """A generation as its actors know it: the agents without their tensors, and whether episodes run on into it."""

    generation: int
    agents: list[Agent]
    carries_over: bool


class Board:
    """Shared memory where a learner publishes parameters with their version, and each actor its heartbeat.

    There are two buffers, written in turn. Whoever has copied one looks whether it was begun anew meanwhile, and then
    copies again; so no read is torn, and nobody waits for anybody.
    """

    def __init__(self, actors: int, memory: SharedMemory | None = None, lock: int | None = None) -> None:
        """`memory` and `lock` are those of another process's board for as many actors; without them it is a new one."""
        self.memory = memory or SharedMemory()
        self.lock = SharedMemory().descriptor if lock is None else lock
        """The descriptor of a file for the record lock alone. A process loses such a lock when it closes any descriptor
        of the file, and each map of the memory has one. flock(2) could not tell the processes apart, which all have the
        same open file.
        """
        self.memory.grow(PAGE + 8 * actors)
        arena = self.memory.arena()
        self._numbers = arena.empty((len(NUMBERS),), torch.int64).numpy()
        self.beats = arena.empty((actors,), torch.float64).numpy()
        """The time of each actor's last step, by the machine's monotonic clock."""
        self._offset = -(-arena.used // PAGE) * PAGE
        self._flats: list[Tensor] = []
        self._states: list[Tensor] = []
        self._next = 0

    @property
    def generation(self) -> int:
        """Return the generation that is published, 0 while there is none."""
        return int(self._numbers[0])

    def describe(self, description: Description, values: int, states: int) -> None:
        """Begin a generation whose agents have so many `values` in all and `states` of acting each."""
        text = json.dumps([agent.describe() for agent in description.agents]).encode()
        self._numbers[0] = 0
        self._numbers[1:] = (0, 0, 0, 0, values, len(description.agents), states, len(text) + 1)
        counted = Arena(offset=self._offset)
        self._place(counted, self._numbers)
        self.memory.grow(counted.used)
        place = self._place(self.memory.arena(self._offset), self._numbers)
        place.copy_(torch.frombuffer(bytearray(text) + bytes([description.carries_over]), dtype=torch.uint8))
        self._next = description.generation

    def publish(self, flat: Tensor, states: Sequence[Tensor], version: int) -> None:
        """Let actors have the parameters [D] and acting states [P] of this version."""
        count = int(self._numbers[2]) + 1
        self._numbers[1] = count
        buffer = count % 2
        self._flats[buffer].copy_(flat)
        for room, values in zip(self._states[buffer], states, strict=True):
            room.copy_(values)
        self._numbers[3 + buffer] = version
        self._numbers[2] = count
        if self._next:
            # With the first parameters of a generation actors may begin it.
            self._numbers[0], self._next = self._next, 0

    def read_description(self) -> Description:
        """Return the generation that is published, as soon as there is one, and use its buffers from then on."""
        while True:
            numbers = self._numbers.copy()
            generation = int(numbers[0])
            if generation and generation == self.generation:
                text = self._place(self.memory.arena(self._offset), numbers).numpy().tobytes()
                if generation == self.generation:
                    agents = [Agent(**each, tensors={}) for each in DESCRIPTIONS.validate_json(text[:-1])]
                    return Description(generation, agents, bool(text[-1]))
            time.sleep(0.001)

    @contextmanager
    def locked(self, look: Callable[[], None] | None = None) -> Iterator[None]:
        """Keep other processes from doing this; the system gives the lock back where one of them is killed.

        While another has the lock, `look` is called again and again, to kill it if it hangs.
        """
        while look is not None and not self._try_lock():
            look()
            time.sleep(0.001)
        if look is None:
            fcntl.lockf(self.lock, fcntl.LOCK_EX)
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
        """Close the descriptors."""
        self.memory.close()
        os.close(self.lock)

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return room for the parameters [D] and acting states [S, P] of the generation whose description was read."""
        return torch.empty_like(self._flats[0]), torch.empty_like(self._states[0])

    def fetch(self, flat: Tensor, states: Tensor, generation: int) -> int | None:
        """Copy the newest parameters [D] and acting states [S, P] and return their version.

        Return None, with whatever has been copied, where this generation is over.
        """
        while True:
            done = int(self._numbers[2])
            buffer = done % 2
            if generation != self.generation:
                return None
            flat.copy_(self._flats[buffer])
            states.copy_(self._states[buffer])
            version = int(self._numbers[3 + buffer])
            if self._numbers[1] <= done + 1 and generation == self.generation:
                return version

    def _place(self, arena: Arena, numbers: NDArray[np.int64]) -> Tensor:
        """Place both buffers in an arena, and behind them the description, which is returned."""
        values, agents, states, description = map(int, numbers[5:9])
        self._states = [arena.empty((states, agents), torch.float64) for _ in range(2)]
        self._flats = [arena.empty((values,), torch.float32) for _ in range(2)]
        return arena.empty((description,), torch.uint8)
