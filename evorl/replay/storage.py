"""Ring buffer of transitions from many environments, in preallocated memory.

Axes: T rows of the ring, one for each step of all streams; N streams, each one environment of one agent; B batch; F
frames of a stack; L true last observations.
Slot t * N + n holds stream n's observation before a step, and the step's results. It keeps its number until the ring
wraps around, so priorities, sequences and n-step returns are arithmetic on slots. The next observation of a step is the
observation of the following one and is stored there: the row ahead of the newest is written with it. Where an episode
begins, the observation that was there moves to a second ring of true last observations. Frames of stacked images are
stored once, a row's newest.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from evorl.replay.frame_stacks import next_age
from evorl.replay.ring import Empty, Field, Kept, Ring
from evorl.replay.slots import GapIndex
from evorl.replay.stored import _append, _check, _load, _state
from evorl.types import Tensors


class Storage(Ring):
    """Ring buffer of the newest `rows` steps of all streams, allocated once.

    A slot can be drawn if its step was valid and its row is among the newest `rows`: its frames and its next
    observation are then available.
    """

    def __init__(
        self,
        rows: int,
        streams: int,
        observation: Mapping[str, Kept],
        columns: Mapping[str, Field],
        device: torch.device,
        store_next: bool = True,
        *,
        empty: Empty | None = None,
        last: int | None = None,
    ) -> None:
        """Allocate `observation` and `columns` of every slot with `empty`.

        Room for true last observations grows where episodes are short, or is fixed at `last`: then the oldest rows are
        dropped earlier. Without `store_next` no next observations are stored. Raises ValueError if memory from `empty`
        would have to grow, or if `last` has no room for one step of all streams.
        """
        if last is None and empty is not None and store_next:
            raise ValueError("memory that is given cannot grow: say how many true last observations to keep")
        if store_next and last is not None and last < streams:
            raise ValueError(f"one step may leave {streams} true last observations, and there is room for {last}")
        super().__init__(rows, streams, observation, columns, device, store_next, empty, last)
        self._grows = last is None
        self.gaps = GapIndex(streams, device)
        self._everyone = torch.ones(streams, dtype=torch.bool)
        self.clear()

    def clear(self) -> None:
        """Empty the storage; the next row is row 0, so that `window` can show as many rows as fit."""
        self.forget_last(2**62)
        self.gaps.clear()
        self.written = 0
        """Total number of rows written."""
        self.oldest = 0
        """Number of the first row whose slots can be drawn."""
        self.broken = True
        """Whether the next transition starts a new segment."""
        self._was_valid = self._everyone

    @property
    def drawable(self) -> int:
        """The number of slots that can be drawn."""
        return (self.written - self.oldest) * self.streams - self.gaps.held

    @property
    def full(self) -> bool:
        """Whether each write now drops the oldest row."""
        return self.written >= self.rows

    def write(
        self,
        observation: Mapping[str, Tensor],
        columns: Mapping[str, Tensor],
        *,
        next_observation: Mapping[str, Tensor],
        valid: Tensor,
        started: Tensor,
        ended: Tensor,
    ) -> Tensor:
        """Append one step of every stream, [N, ...] each, and return its slots [N].

        `started` marks streams where `observation` begins an episode; elsewhere it must equal the previous
        `next_observation`. `ended` marks terminated or truncated steps. Steps that are not `valid` are never drawn.
        Columns that are left out keep their old contents. `valid` and `started` are read on the host: passing them on
        the CPU avoids a GPU synchronisation.
        """
        valid, started = valid.cpu(), started.cpu()
        whole, begins = bool(valid.all()), bool(started.any())
        # The last next observation is already in this row, and is the current observation unless an episode begins.
        fresh = self.broken or begins or not self.store_next
        if self.broken:
            self._begin(observation, started)
        else:
            if begins:
                self._keep_last(started & self._was_valid)
            if begins or not whole:
                self.flags["boundary"][self.newest_row] |= (started | ~valid).to(self.device)
        row, ahead = self.written % self.ring, (self.written + 1) % self.ring
        for name, part in self.parts.items():
            values = self.seen[name]
            if fresh:
                values[row] = observation[name][:, -1] if part.frames else observation[name]
            if self.store_next:
                values[ahead] = next_observation[name][:, -1] if part.frames else next_observation[name]
        for name, values in columns.items():
            self.columns[name][row] = values
        self.flags["valid"][row] = valid
        self.flags["boundary"][row] = ended
        if self.depth > 1:
            age = self.flags["age"]
            age[row] = next_age(age[row - 1], started.to(self.device), self.depth)
        if not whole:
            self.gaps.append(self.written * self.streams + np.flatnonzero(~valid.numpy()))
        self._was_valid = self._everyone if whole else valid.clone()
        self._advance()
        return torch.arange(row * self.streams, (row + 1) * self.streams, device=self.device)

    def break_streams(self) -> None:
        """Mark a discontinuity: the next transition starts a new segment; the last observations are kept."""
        if self.broken:
            return
        self.flags["boundary"][self.newest_row] = True
        if self.depth > 1:
            # Turn the row ahead into one without valid steps: new stacks write such rows anyway, and saving all frames
            # of the stacks as last observations would need many more places.
            age = self.flags["age"][self.newest_row] + 1
            self._write_nothing(age.clamp_(max=self.depth - 1))
        elif self.store_next:
            self._keep_last(self._was_valid)
        self.broken = True

    def nth(self, index: Tensor) -> Tensor:
        """Return the slots [...] at positions `index` [...], below `drawable`, among drawable slots, oldest first."""
        if self.gaps.held:
            return self.gaps.find(index, self.oldest).remainder_(self.slots)
        return (index + self.oldest % self.ring * self.streams).remainder_(self.slots)

    def can_draw(self, slots: Tensor) -> Tensor:
        """Return a mask of the `slots` [...] that can be drawn."""
        ago = (self.newest_row - slots // self.streams) % self.ring
        return self.flags["valid"].view(-1)[slots] & (ago < self.written - self.oldest)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Return the written rows of the ring and its counters for a checkpoint."""
        return _state(self)

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Restore from `state`: exactly into an empty storage of the same shape, otherwise appended, oldest first.

        Raises UserError for a state that does not fit these parts and columns.
        """
        _check(self, tensors, numbers)
        if not numbers["written"]:
            return
        last = len(tensors["last_slots"]) if self.store_next else 0
        same = (numbers["rows"], numbers["streams"]) == (self.rows, self.streams)
        if same and not self.written and (self._grows or last <= self.last.size):
            self._load(tensors, numbers)
            return
        # Only as many rows as the file holds, so that a forged row count cannot allocate more than the file's size.
        rows, cpu = min(numbers["rows"], numbers["written"]), torch.device("cpu")
        source = Storage(rows, numbers["streams"], self.parts, self.fields, cpu, self.store_next)
        source._load(tensors, numbers)
        _append(source, self)

    def _load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Load a checked state into an empty storage of the same rows, or of fewer if none was overwritten."""
        self.written, self.oldest, self.broken = numbers["written"], numbers["oldest"], bool(numbers["broken"])
        _load(self, tensors)
        rows = np.arange(self.oldest, self.written) % self.ring
        valid = tensors["valid"].cpu()
        self.gaps.append(self.oldest * self.streams + np.flatnonzero(~valid.numpy()[rows]))
        self._was_valid = valid[self.newest_row].clone()

    def _begin(self, observation: Mapping[str, Tensor], started: Tensor) -> None:
        """Write the older frames of stacks whose episodes began before the storage did, as rows without valid steps."""
        stacks = {name: part.frames for name, part in self.parts.items() if part.frames}
        for earlier in range(self.depth - 1, 0, -1) if not started.all() else ():
            for name, frames in stacks.items():
                self.seen[name][self.written % self.ring] = observation[name][:, -1 - min(earlier, frames - 1)]
            self._write_nothing(self.depth - 1 - earlier)
        self.broken = False

    def _write_nothing(self, age: Tensor | int) -> None:
        """Append a row without valid steps."""
        row = self.written % self.ring
        self.flags["valid"][row] = False
        self.flags["boundary"][row] = True
        self.flags["age"][row] = age
        self.gaps.append(self.written * self.streams + np.arange(self.streams))
        self._advance()

    def _advance(self) -> None:
        self.written += 1
        self._drop(self.written - self.rows)

    def _drop(self, oldest: int) -> None:
        """Exclude the rows before `oldest` from drawing."""
        if oldest > self.oldest:
            self.oldest = oldest
            self.gaps.drop(oldest)
            self.forget_last(oldest)

    def _keep_last(self, streams: Tensor) -> None:
        """Save the last observations of `streams` [N] from being overwritten."""
        chosen = streams.numpy().nonzero()[0]
        if not (self.store_next and len(chosen)):
            return
        ahead, index = self.written % self.ring, torch.from_numpy(chosen).to(self.device)
        while not self._grows and self.last.held + len(chosen) > self.last.size:
            self._drop(self.last.oldest_row + 1)
        self.keep_last(self.written - 1, chosen, {name: values[ahead][index] for name, values in self.seen.items()})
