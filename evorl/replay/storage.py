"""Ring buffer of transitions from many environments, in preallocated memory.

Axes: T rows of the ring, one for each step of all lanes; N lanes, each one environment of one agent; B batch; F
frames of a stack; L final observations.

Rows are numbered from the start of the storage. Index t * N + n holds lane n's observation before a step, and the
step's results. It keeps its number until the ring wraps around, so priorities, sequences and n-step returns are
arithmetic on indices. The next observation of a step is the observation of the following one and is stored there: the
row ahead of the newest is written with it. Where an episode begins, the observation that was there moves to a second
ring of final observations. Frames of stacked images are stored once, a row's newest.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.envs.spaces import ObservationSpec
from evorl.system.formats import check_tensors, numbers_to_tensors, with_prefix
from evorl.types import Tensors, Transition, UserError

Integers = NDArray[np.int64]
Field = tuple[tuple[int, ...], torch.dtype]
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates an uninitialised tensor of a shape and dtype."""
WHERE = "the replay"
NUMBERS = ("rows", "lanes", "written", "oldest", "broken")
"""The counters in a state."""
MOST = 2**40
"""Upper bound on rows ever written."""
ROUNDS = 16
"""Draws of invalid steps are rejected and repeated this often, before the valid ones are listed."""


def next_age(before: Tensor, started: Tensor, depth: int) -> Tensor:
    """Number of earlier frames [N] of the episode available to a row, from that of the previous row.

    It is capped at `depth` - 1, all that a stack shows.
    """
    return (before + 1).clamp_(max=depth - 1).masked_fill_(started, 0)


def stack_index(index: Tensor, age: Tensor, frames: int, lanes: int, size: int) -> Tensor:
    """Storage indices [B, F] of the frames in the stacks at `index` [B], newest last.

    Frames before the episode's first, by `age` [B], map to index `size`, which holds a zero frame.
    """
    ago = torch.arange(frames - 1, -1, -1, device=index.device)
    frame_index = (index.unsqueeze(-1) - ago * lanes) % size
    return frame_index.masked_fill_(ago > age.unsqueeze(-1), size)


class FinalRing:
    """Ring of `size` entries for final observations, with the steps that they belong to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Remove all entries."""
        self.held = 0
        """Number of entries."""
        self._head = 0
        self._rows: deque[tuple[int, Integers]] = deque()

    @property
    def oldest_row(self) -> int:
        """Number of the first row with an entry."""
        return self._rows[0][0]

    def append(self, row: int, lanes: Integers) -> Integers:
        """Reserve and return entries [B] for a row's `lanes` [B]; there must be room."""
        entries = (self._head + self.held + np.arange(len(lanes))) % self.size
        self._rows.append((row, lanes))
        self.held += len(lanes)
        return entries

    def drop(self, oldest: int) -> list[tuple[int, Integers]]:
        """Remove the entries of rows before `oldest`, and return these rows with their lanes."""
        dropped = []
        while self._rows and self._rows[0][0] < oldest:
            dropped.append(self._rows.popleft())
            count = len(dropped[-1][1])
            self._head = (self._head + count) % self.size
            self.held -= count
        return dropped

    def entries(self) -> Integers:
        """All entries in use [B], oldest first."""
        return (self._head + np.arange(self.held)) % max(1, self.size)

    def numbers(self, lanes: int) -> Integers:
        """Step numbers [B] of all entries, oldest first."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(row * lanes + own for row, own in self._rows)])

    def enlarge(self, size: int) -> None:
        """Grow the ring to `size` entries; existing entries must be moved to its start."""
        self.size, self._head = size, 0


def deepest(observation: Mapping[str, ObservationSpec]) -> int:
    """Depth of the deepest frame stack, or 1 if nothing is stacked."""
    return max([1, *(part.frames for part in observation.values())])


def link_type(size: int) -> torch.dtype:
    """Smallest integer dtype that can index a storage of this many steps."""
    return torch.int32 if 2 * size + 1 < 2**31 else torch.int64


def finals_at_first(rows: int, lanes: int, depth: int) -> int:
    """Initial number of entries for final observations."""
    # With stacks, an environment that spends a step on a reset leaves its last observation in the ring.
    return max(lanes, rows * lanes // 32) if depth == 1 else 0


def memory_at_first(
    rows: int, lanes: int, observation: Mapping[str, ObservationSpec], columns: Mapping[str, Field]
) -> int:
    """Initial size in bytes of a storage with next observations, without allocating it."""
    depth = deepest(observation)
    size = (rows + depth) * lanes
    shapes = [(part.shape[1:] if part.frames else part.shape, part.dtype) for part in observation.values()]
    seen, kept = (
        sum(math.prod(shape) * dtype.itemsize for shape, dtype in each) for each in (shapes, columns.values())
    )
    flags = 3 if depth > 1 else 2
    observations = size + 1 + finals_at_first(rows, lanes, depth)
    return observations * seen + size * (kept + flags + link_type(size).itemsize)


class Transitions(NamedTuple):
    """Gathered observation parts, next observation parts and columns, each [..., ...]."""

    observation: Tensors
    next_observation: Tensors
    columns: Tensors


def rows_held(written: int, ring: int) -> int:
    """Number of rows of the ring in use, including the one ahead of the newest."""
    return min(written + 1, ring) if written else 0


def last_numbers(index: Tensor, written: int, ring: int, lanes: int) -> Integers:
    """Step numbers [L], counted from the start of the storage, of ring `index` [L].

    The newest row holds the latest numbers.
    """
    positions = index.cpu().numpy()
    rows = written - 1 - (written - 1 - positions // lanes) % ring
    return np.asarray(rows * lanes + positions % lanes, dtype=np.int64)


class Storage:
    """Ring buffer of the newest `rows` steps of all lanes; index t * N + n is row t of lane n.

    A step can be drawn if its step was valid and its row is among the newest `rows`: its frames and its next
    observation are then available.

    Each observation part has one tensor: T * N for the steps, one of zeros, and L for final
    observations. `links` holds the index of each step's next observation.
    """

    def __init__(
        self,
        rows: int,
        lanes: int,
        observation: Mapping[str, ObservationSpec],
        columns: Mapping[str, Field],
        device: torch.device,
        store_next: bool = True,
        *,
        empty: Empty | None = None,
        last: int | None = None,
    ) -> None:
        """Allocate `rows` steps, plus the rows before and after that their observations need, with `empty`.

        Room for final observations grows where episodes are short, or is fixed at `last`: then the oldest rows are
        dropped earlier. Without `store_next` no next observations are stored. Raises ValueError if memory from `empty`
        would have to grow, or if `last` has no room for one step of all lanes.
        """
        if last is None and empty is not None and store_next:
            raise ValueError("memory that is given cannot grow: say how many final observations to keep")
        if store_next and last is not None and last < lanes:
            raise ValueError(f"one step may leave {lanes} final observations, and there is room for {last}")
        self.rows, self.lanes, self.device = rows, lanes, device
        self.store_next = store_next
        self.parts = dict(observation)
        self.fields = dict(columns)
        self.depth = deepest(self.parts)
        """F: the depth of the deepest frame stack."""
        self.ring = rows + self.depth
        """T: the kept rows, one for the latest observation, and F - 1 for older frames."""
        self.size = self.ring * lanes
        self._empty = empty or partial(_zeros, device)
        self.columns = {
            name: self._empty((self.ring, lanes, *shape), dtype) for name, (shape, dtype) in columns.items()
        }
        flags = {"valid": torch.bool, "boundary": torch.bool} | ({"age": torch.uint8} if self.depth > 1 else {})
        self.flags = {name: self._empty((self.ring, lanes), dtype).zero_() for name, dtype in flags.items()}
        """`valid`; `boundary`: the next row does not continue this one; `age`: earlier frames available to a row."""
        self._flat = {name: values.flatten(0, 1) for name, values in (self.columns | self.flags).items()}
        self.links = self._empty((self.size if store_next else 0,), link_type(self.size))
        self.links[:] = torch.arange(lanes, lanes + len(self.links), device=device)
        self.links[-lanes:] %= self.size
        self.seen: Tensors = {}
        """Observation parts [T, N, ...]; of stacks only the newest frame."""
        self._data: Tensors = {}
        size = finals_at_first(rows, lanes, self.depth) if last is None else last
        self.last = FinalRing(size if store_next else 0)
        self._take_memory()
        self._grows = last is None
        self._invalid = np.zeros(self.ring, dtype=np.int64)
        self._everyone = torch.ones(lanes, dtype=torch.bool)
        self.clear()

    @property
    def memory(self) -> int:
        """The allocated size in bytes."""
        tensors = [*self._data.values(), *self.columns.values(), *self.flags.values(), self.links]
        return sum(tensor.nbytes for tensor in tensors)

    def clear(self) -> None:
        """Empty the storage; the next row is row 0, so that `window` can show as many rows as fit."""
        self.forget_last(2**62)
        self.gaps = 0
        """Number of steps among the newest `rows` that are not valid."""
        self.written = 0
        """Total number of rows written."""
        self.oldest = 0
        """Number of the first row whose steps can be drawn."""
        self.broken = True
        """True if the next transition starts a new segment."""
        self._was_valid = self._everyone

    @property
    def drawable(self) -> int:
        """The number of steps that can be drawn."""
        return (self.written - self.oldest) * self.lanes - self.gaps

    @property
    def full(self) -> bool:
        """True if each write now drops the oldest row."""
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
    ) -> None:
        """Append one step of every lane, [N, ...] each.

        `started` marks lanes where `observation` begins an episode; elsewhere it must equal the previous
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
        self._count_invalid(0 if whole else int((~valid).sum()))
        self._was_valid = self._everyone if whole else valid.clone()
        self._advance()

    def write_step(self, transition: Transition, columns: Mapping[str, Tensor]) -> None:
        """Append a step of environments [P, E], which are the N lanes, with `columns` [P, E, ...]."""
        self.write(
            {name: value.flatten(0, 1) for name, value in transition.observation.items()},
            {name: value.flatten(0, 1) for name, value in columns.items()},
            next_observation={name: value.flatten(0, 1) for name, value in transition.next_observation.items()},
            valid=transition.valid.flatten(),
            started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
        )

    def break_lanes(self) -> None:
        """Mark a discontinuity: the next transition starts a new segment; the last observations are kept."""
        if self.broken:
            return
        self.flags["boundary"][self.newest_row] = True
        if self.depth > 1:
            # Turn the row ahead into one without valid steps: new stacks write such rows anyway, and saving all frames
            # of the stacks as last observations would need many more frame_index.
            age = self.flags["age"][self.newest_row] + 1
            self._write_nothing(age.clamp_(max=self.depth - 1))
        elif self.store_next:
            self._keep_last(self._was_valid)
        self.broken = True

    @property
    def newest_row(self) -> int:
        """The ring index of the latest row."""
        return (self.written - 1) % self.ring

    def window(self, start_row: int, steps: int) -> Tensors:
        """Views [T, N, ...] of `steps` rows of the ring, without stacked parts.

        The views are columns, `observation.` parts and the flags `valid` and `boundary` (the next row does not continue
        this one). Raises ValueError if the window is not contiguous.
        """
        if not 0 <= start_row <= self.ring - steps:
            raise ValueError(f"{steps} rows from row {start_row} do not lie in one piece of {self.ring} rows")
        rows = slice(start_row, start_row + steps)
        shown = {f"observation.{name}": self.seen[name] for name, part in self.parts.items() if not part.frames}
        flags = {name: self.flags[name] for name in ("valid", "boundary")}
        return {name: values[rows] for name, values in (shown | self.columns | flags).items()}

    def gather(self, index: Tensor, names: Iterable[str] | None = None) -> Transitions:
        """Gather transitions at `index` [...], with the columns and flags in `names`, or all columns."""
        flat, shape = index.reshape(-1), index.shape
        columns = self.gather_columns(index, self.columns if names is None else names)
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
            frame_index = self._stack_index(flat, part.frames)
            if self.store_next:
                # The two stacks share all frames but one each: gather once and return two views of the same memory.
                frame_index = torch.cat([frame_index, links.unsqueeze(-1)], -1)
            frames = data.index_select(0, frame_index.flatten()).view(*frame_index.shape, *data.shape[1:])
            seen[name] = _shaped(frames[:, : part.frames], shape)
            if self.store_next:
                following[name] = _shaped(frames[:, 1:], shape)
        return Transitions(seen, following, columns)

    def gather_columns(self, index: Tensor, names: Iterable[str]) -> Tensors:
        """Gather the named columns and flags [..., ...] at `index` [...]."""
        flat, shape = index.reshape(-1), index.shape
        return {name: _shaped(self._flat[name].index_select(0, flat), shape) for name in names}

    def observation(self, index: Tensor) -> Tensors:
        """Gather the observations [..., ...] at `index` [...]."""
        flat, seen = index.reshape(-1), {}
        for name, part in self.parts.items():
            frame_index = self._stack_index(flat, part.frames) if part.frames else flat
            values = self._data[name].index_select(0, frame_index.flatten())
            seen[name] = values.view((*index.shape, *part.shape))
        return seen

    def next_observation(self, index: Tensor) -> Tensors:
        """Gather the next observations [..., ...] at `index` [...], including final observations of episodes."""
        flat, seen = index.reshape(-1), {}
        following = self.links.index_select(0, flat).unsqueeze(-1)
        for name, part in self.parts.items():
            # The next stack is this one without its oldest frame, plus one new frame.
            frame_index = following
            if part.frames:
                frame_index = torch.cat([self._stack_index(flat, part.frames - 1), following], -1)
            values = self._data[name].index_select(0, frame_index.flatten())
            seen[name] = values.view((*index.shape, *part.shape))
        return seen

    def following(self, index: Tensor, steps: Tensor | int) -> Tensor:
        """Indices [...] `steps` [...] later in the same lanes."""
        return (index + steps * self.lanes) % self.size

    def window_end(self, index: Tensor, n: int) -> Tensor:
        """Number of consecutive steps [...] from `index` [...] on, including the first, at most `n`."""
        later = self.following(index.unsqueeze(-1), torch.arange(n, device=self.device))
        cut = self.flags["boundary"].view(-1).index_select(0, later.view(-1)).view(later.shape)
        cut[..., -1] = True
        until_newest = (self.newest_row - index // self.lanes) % self.ring
        # argmax returns the first of several equal maxima.
        return torch.minimum(cut.byte().argmax(-1), until_newest) + 1

    def window_start(self, index: Tensor, n: int) -> Tensor:
        """Number of consecutive steps [...] that lead to `index` [...], at most `n`."""
        earlier = self.following(index.unsqueeze(-1), -torch.arange(1, n + 1, device=self.device))
        cut = self.flags["boundary"].view(-1).index_select(0, earlier.view(-1)).view(earlier.shape)
        cut = torch.cat((cut, torch.ones_like(index, dtype=torch.bool).unsqueeze(-1)), -1)
        since_oldest = (index // self.lanes - self.oldest) % self.ring
        return torch.minimum(cut.byte().argmax(-1), since_oldest)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Indices of this shape, drawn uniformly and with replacement from those that can be drawn.

        Invalid ones are rejected and drawn again, which leaves all valid ones equally likely. Those that `ROUNDS`
        rounds have left come from a list of the valid ones. Indices are arbitrary where none can be drawn.
        """
        first, count = self.oldest % self.ring * self.lanes, (self.written - self.oldest) * self.lanes

        def drawn(below: int) -> Tensor:
            return torch.randint(below, shape, generator=generator, device=self.device)

        index = (drawn(max(1, count)) + first).remainder_(self.size)
        if not self.gaps or not self.drawable:
            return index
        valid = self.flags["valid"].view(-1)
        for _ in range(ROUNDS):
            rejected = ~valid[index]
            if not rejected.any():
                return index
            index = torch.where(rejected, (drawn(count) + first).remainder_(self.size), index)
        return torch.where(valid[index], index, self.valid_index()[drawn(self.drawable)])

    def valid_index(self) -> Tensor:
        """All indices [B] that can be drawn, oldest first."""
        numbers = torch.arange(self.oldest * self.lanes, self.written * self.lanes, device=self.device)
        index = numbers.remainder_(self.size)
        return index[self.flags["valid"].view(-1)[index]]

    def can_draw(self, index: Tensor) -> Tensor:
        """Mask of the `index` [...] that can be drawn."""
        ago = (self.newest_row - index // self.lanes) % self.ring
        return self.flags["valid"].view(-1)[index] & (ago < self.written - self.oldest)

    def last_observations(self) -> tuple[Tensors, Tensor]:
        """All final observations, parts [L, ...] with one frame per stack, and the index [L] of their steps."""
        frame_index = self._tensor(self.last.entries() + self.size + 1)
        parts = {name: data.index_select(0, frame_index) for name, data in self._data.items()}
        return parts, self._tensor(self.last.numbers(self.lanes) % self.size)

    def keep_last(self, row: int, lanes: Integers, parts: Mapping[str, Tensor]) -> None:
        """Save final observations, parts [B, ...] with one frame per stack, of `lanes` [B] of a row."""
        if self.last.held + len(lanes) > self.last.size:
            self._enlarge(max(2 * self.last.size, self.last.held + len(lanes)))
        frame_index = self._tensor(self.last.append(row, lanes) + self.size + 1)
        for name, data in self._data.items():
            data[frame_index] = parts[name].to(self.device)
        self.links[self._tensor(row % self.ring * self.lanes + lanes)] = frame_index.to(self.links.dtype)

    def forget_last(self, oldest: int) -> None:
        """Release the final observations of rows before `oldest`."""
        for row, lanes in self.last.drop(oldest):
            index = self._tensor(row % self.ring * self.lanes + lanes)
            self.links[index] = self.following(index, 1).to(self.links.dtype)

    def state_dict(self) -> Tensors:
        """Written rows of the ring and its counters."""
        held = rows_held(self.written, self.ring)
        tensors = {name: values[:held] for name, values in self._stores()}
        if self.store_next:
            last, tensors["last_index"] = self.last_observations()
            tensors |= with_prefix("last.", last)
        return tensors | numbers_to_tensors(**{name: int(getattr(self, name)) for name in NUMBERS})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict` of a storage of the same shape. Raises UserError for another one."""
        *_, written, oldest, broken = self._checked(tensors)
        self.clear()
        if not written:
            return
        self.written, self.oldest, self.broken = written, oldest, bool(broken)
        held = rows_held(self.written, self.ring)
        for name, values in self._stores():
            values[:held] = tensors[name].to(self.device)
        if self.store_next:
            self._load_last(tensors)
        valid = tensors["valid"].cpu()
        self._invalid[:held] = (~valid).sum(1).numpy()
        self.gaps = int(self._invalid[np.arange(self.oldest, self.written) % self.ring].sum())
        self._was_valid = valid[self.newest_row].clone()

    def _load_last(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the final observations of a checked state, row by row."""
        if not len(tensors["last_index"]):
            return
        numbers = last_numbers(tensors["last_index"], self.written, self.ring, self.lanes)
        rows = numbers // self.lanes
        edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
        for start, stop in itertools.pairwise(edges):
            parts = {name: tensors[f"last.{name}"][start:stop] for name in self.parts}
            self.keep_last(int(rows[start]), numbers[start:stop] % self.lanes, parts)

    def _stores(self) -> list[tuple[str, Tensor]]:
        """All tensors [T, N, ...] with their names in a state."""
        seen = [(f"observation.{name}", values) for name, values in self.seen.items()]
        columns = [(f"column.{name}", values) for name, values in self.columns.items()]
        return [*seen, *columns, *self.flags.items()]

    def _checked(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """The numbers of a state. Raises UserError unless it fits a storage of these parts and columns."""
        numbers = {name: tensors[name] for name in NUMBERS if name in tensors}
        check_tensors(numbers, dict.fromkeys(NUMBERS, ((), torch.int64)), WHERE)
        rows, lanes, written, oldest, broken = (int(numbers[name]) for name in NUMBERS)
        if (rows, lanes) != (self.rows, self.lanes):
            raise UserError(f"{WHERE}: has {rows} rows of {lanes} environments, not {self.rows} rows of {self.lanes}")
        if not max(0, written - rows) <= oldest <= written <= MOST or broken not in (0, 1):
            raise UserError(f"{WHERE}: invalid state: {written} rows from {oldest} on, in a ring of {rows} rows")
        ring = rows + self.depth
        held = rows_held(written, ring)
        last = len(tensors["last_index"]) if "last_index" in tensors and tensors["last_index"].dim() else 0
        check_tensors(tensors, self._expected(held, lanes, last), WHERE)
        index = tensors["last_index"].cpu() if self.store_next else torch.zeros(0)
        if ((index < 0) | (index >= held * lanes)).any():
            raise UserError(f"{WHERE}: tensor 'last_index' names steps that are not there")
        return [rows, lanes, written, oldest, broken]

    def _expected(self, held: int, lanes: int, last: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of a state."""
        expected = {f"column.{name}": ((held, lanes, *shape), dtype) for name, (shape, dtype) in self.fields.items()}
        expected |= {name: ((held, lanes), values.dtype) for name, values in self.flags.items()}
        expected |= dict.fromkeys(NUMBERS, ((), torch.int64))
        for name, part in self.parts.items():
            shape = part.shape[1:] if part.frames else part.shape
            expected[f"observation.{name}"] = (held, lanes, *shape), part.dtype
            if self.store_next:
                expected[f"last.{name}"] = (last, *shape), part.dtype
        return expected | ({"last_index": ((last,), torch.int64)} if self.store_next else {})

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
        self._count_invalid(self.lanes)
        self._advance()

    def _count_invalid(self, count: int) -> None:
        """Record that `count` steps of the row being written are invalid."""
        self._invalid[self.written % self.ring] = count
        self.gaps += count

    def _advance(self) -> None:
        self.written += 1
        self._drop(self.written - self.rows)

    def _drop(self, oldest: int) -> None:
        """Exclude the rows before `oldest` from drawing."""
        if oldest > self.oldest:
            self.gaps -= int(self._invalid[np.arange(self.oldest, oldest) % self.ring].sum())
            self.oldest = oldest
            self.forget_last(oldest)

    def _keep_last(self, lanes: Tensor) -> None:
        """Save the last observations of `lanes` [N] from being overwritten."""
        chosen = lanes.numpy().nonzero()[0]
        if not (self.store_next and len(chosen)):
            return
        ahead, index = self.written % self.ring, torch.from_numpy(chosen).to(self.device)
        while not self._grows and self.last.held + len(chosen) > self.last.size:
            self._drop(self.last.oldest_row + 1)
        self.keep_last(self.written - 1, chosen, {name: values[ahead][index] for name, values in self.seen.items()})

    def _enlarge(self, size: int) -> None:
        """Grow to `size` final observations; parts are copied one at a time, as old and new must coexist."""
        kept, index = self.last_observations()
        self.last.enlarge(size)
        self._take_memory()
        for name, values in kept.items():
            self._data[name][self.size + 1 : self.size + 1 + len(values)] = values
        self.links[index] = torch.arange(len(index), device=self.device).to(self.links.dtype) + self.size + 1

    def _take_memory(self) -> None:
        """Allocate observation memory and copy existing observations into it."""
        for name, part in self.parts.items():
            shape = part.shape[1:] if part.frames else part.shape
            data = self._empty((self.size + 1 + self.last.size, *shape), part.dtype)
            if name in self._data:
                data[: self.size] = self._data[name][: self.size]
            data[self.size] = 0
            self._data[name] = data
            self.seen[name] = data[: self.size].view(self.ring, self.lanes, *shape)

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _stack_index(self, index: Tensor, frames: int) -> Tensor:
        """Frame indices [B, F] of the newest `frames` frames of the stacks at `index` [B]."""
        if self.depth == 1:
            return index.unsqueeze(-1)[:, :frames]
        return stack_index(index, self.flags["age"].view(-1)[index], frames, self.lanes, self.size)


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _shaped(values: Tensor, shape: torch.Size) -> Tensor:
    """Reshape values [B, ...] to [*shape, ...]."""
    return values.view((*shape, *values.shape[1:]))
