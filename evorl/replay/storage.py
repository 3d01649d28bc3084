"""Ring buffer of transitions from many environments, in preallocated memory.

Axes: T rows of the ring, one for each step of all lanes; N lanes, each one environment of one agent; I islands of
agents, which have equally many of the lanes, one after another; P agents, B batch; F frames of a stack.

Rows are numbered from the start of the storage. Index t * N + n holds lane n's observation before a step, and the
step's results. It keeps its number until the ring wraps around, so priorities, sequences and n-step returns are
arithmetic on indices. The next observation of a step is the observation of the following one and is stored there: the
row ahead of the newest is written with it. Where an episode begins, the observation that was there moves to a second
ring, at the index of the step that it is the result of. Frames of stacked images are stored once, a row's newest.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.envs.spaces import EnvSpec, ObservationSpec
from evorl.system.devices import is_host
from evorl.system.formats import check_tensors, numbers_to_tensors
from evorl.system.processes import check_room
from evorl.types.batches import Transition
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

Field = tuple[tuple[int, ...], torch.dtype]
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates an uninitialised tensor of a shape and dtype."""
WHERE = "the replay"
COUNTERS = ("rows", "lanes", "written", "oldest", "broken")
"""The counters in a state."""
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""The flag of a map that may be larger than the memory is, as most of a second ring is never written."""
ROUNDS = 16
"""Draws of invalid steps are rejected and repeated this often, before the valid ones are listed."""


class Transitions(NamedTuple):
    """Gathered observation parts, next observation parts and columns, each [..., ...]."""

    observation: Tensors
    next_observation: Tensors
    columns: Tensors


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Pages that nothing writes take no memory: torch.zeros would write all, and pages of 2 MB hold some rows each.
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError:
        return torch.zeros(shape, dtype=dtype)  # Whose error names the settings that take less.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)


def rows_held(written: int, ring: int) -> int:
    """Number of rows of the ring in use, including the one ahead of the newest."""
    return min(written + 1, ring) if written else 0


class Storage:
    """Ring buffer of the newest `rows` steps of all lanes; index t * N + n is row t of lane n.

    A step can be drawn if its step was valid and its row is among the newest `rows`: its frames and its next
    observation are then available.
    """

    def __init__(
        self,
        rows: int,
        lanes: int,
        observation: Mapping[str, ObservationSpec],
        columns: Mapping[str, Field],
        device: torch.device,
        *,
        empty: Empty | None = None,
        islands: int = 1,
    ) -> None:
        """Allocate `rows` steps, plus the rows before and after that their observations need, with `empty` if given."""
        self.rows, self.lanes, self.device = rows, lanes, device
        self.islands, self.width = islands, lanes // islands
        """I, and the lanes of each island."""
        self.parts = dict(observation)
        self.fields = dict(columns)
        self.depth = max([1, *(part.frames for part in self.parts.values())])
        """F: the depth of the deepest frame stack."""
        self.ring = rows + self.depth
        """T: the kept rows, one for the latest observation, and F - 1 for older frames."""
        self.size = self.ring * lanes
        empty = empty or partial(_zeros, device=device)
        self.columns = {name: empty((self.ring, lanes, *shape), dtype) for name, (shape, dtype) in columns.items()}
        flags = {"valid": torch.bool, "boundary": torch.bool, "final": torch.bool}
        flags |= {"age": torch.uint8} if self.depth > 1 else {}
        self.flags = {name: empty((self.ring, lanes), dtype).zero_() for name, dtype in flags.items()}
        """`valid`; `boundary`: the next row does not continue this one; `final`: the next observation is in the second
        ring; `age`: earlier frames available to a row."""
        self._flat = {name: values.flatten(0, 1) for name, values in (self.columns | self.flags).items()}
        self.seen: Tensors = {}
        """Observation parts [T, N, ...]; of stacks only the newest frame."""
        self._data: Tensors = {}
        """Observation parts: T * N for the steps, one of zeros, and T * N of the second ring."""
        for name, part in self.parts.items():
            shape = part.shape[1:] if part.frames else part.shape
            self._data[name] = empty((2 * self.size + 1, *shape), part.dtype)
            self._data[name][self.size] = 0
            self.seen[name] = self._data[name][: self.size].view(self.ring, lanes, *shape)
        self._invalid = np.zeros((self.ring, islands), dtype=np.int64)
        self._everyone = torch.ones(lanes, dtype=torch.bool)
        self.clear()

    def memory(self, *, second_ring: bool) -> int:
        """The size in bytes; a host's second ring takes memory only where final observations are written."""
        observations = self._data if second_ring else self.seen
        return sum(tensor.nbytes for tensor in (*observations.values(), *self.columns.values(), *self.flags.values()))

    def clear(self) -> None:
        """Empty the storage; the next row is row 0."""
        self.gaps = np.zeros(self.islands, dtype=np.int64)
        """Numbers of steps [I] among the newest `rows` that are not valid."""
        self.written = 0
        """Total number of rows written."""
        self.oldest = 0
        """Number of the first row whose steps can be drawn."""
        self.broken = True
        """True if the next transition starts a new segment."""
        self._was_valid = self._everyone

    @property
    def drawable(self) -> int:
        return int(self.drawable_of_islands.sum())

    @property
    def drawable_of_islands(self) -> NDArray[np.int64]:
        """The numbers of steps [I] that can be drawn."""
        return (self.written - self.oldest) * self.width - self.gaps

    @property
    def full(self) -> bool:
        """True if each write now drops the oldest row."""
        return self.written >= self.rows

    @property
    def newest_row(self) -> int:
        return (self.written - 1) % self.ring

    def write(
        self,
        observation: Mapping[str, Tensor],
        columns: Mapping[str, Tensor],
        *,
        next_observation: Mapping[str, Tensor],
        valid: Tensor,
        started: Tensor,
        ended: Tensor,
        whole: bool = False,
    ) -> None:
        """Append one step of every lane, [N, ...] each; `whole` says that all are known to be valid.

        `started` marks lanes where `observation` begins an episode; elsewhere it must equal the previous
        `next_observation`. `ended` marks terminated or truncated steps. Steps that are not `valid`, of which each
        follows an end, are never drawn. Columns that are left out keep their old contents. `valid` and `started` are
        read on the host, unless they are on a GPU and the step is `whole`: then nothing waits for it.
        """
        unread = whole and not is_host(started.device)
        valid, started = (valid, started) if unread else (valid.cpu(), started.cpu())
        whole, begins = whole or bool(valid.all()), unread or bool(started.any())
        # The last next observation is already in this row, and is the current observation unless an episode begins.
        fresh = self.broken or begins
        if self.broken:
            self._begin(observation, started)
        else:
            if begins:
                self._keep_final(started if unread else started & self._was_valid)
                self.flags["boundary"][self.newest_row] |= started.to(self.device)
        row, ahead = self.written % self.ring, (self.written + 1) % self.ring
        for name, part in self.parts.items():
            if fresh:
                self.seen[name][row] = observation[name][:, -1] if part.frames else observation[name]
            self.seen[name][ahead] = next_observation[name][:, -1] if part.frames else next_observation[name]
        for name, values in columns.items():
            self.columns[name][row] = values
        self.flags["valid"][row] = valid
        self.flags["boundary"][row] = ended
        self.flags["final"][row] = False
        if self.depth > 1:
            age = self.flags["age"]
            age[row] = (age[row - 1] + 1).clamp_(max=self.depth - 1).masked_fill_(started.to(self.device), 0)
        self._was_valid = self._everyone if whole else valid.clone()
        self._advance(0 if whole else self._by_island(~valid))

    def write_step(self, transition: Transition, columns: Mapping[str, Tensor]) -> None:
        """Append a step of environments [P, E], which are the N lanes, with `columns` [P, E, ...]."""
        self.write(
            {name: value.flatten(0, 1) for name, value in transition.observation.items()},
            {name: value.flatten(0, 1) for name, value in columns.items()},
            next_observation={name: value.flatten(0, 1) for name, value in transition.next_observation.items()},
            valid=transition.valid.flatten(),
            started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
            whole=transition.all_valid,
        )

    def break_lanes(self) -> None:
        """Mark a discontinuity: the next transition starts a new segment; the last observations are kept."""
        if self.broken:
            return
        self.flags["boundary"][self.newest_row] = True
        if self.depth > 1:
            # The row ahead becomes one without valid steps: a new stack writes such rows anyway.
            age = self.flags["age"][self.newest_row] + 1
            self._write_nothing(age.clamp_(max=self.depth - 1))
        else:
            self._keep_final(self._was_valid)
        self.broken = True

    def _begin(self, observation: Mapping[str, Tensor], started: Tensor) -> None:
        """Write the older frames of stacks whose episodes began before the storage did, as rows without valid steps."""
        stacks = {name: part.frames for name, part in self.parts.items() if part.frames}
        for earlier in range(self.depth - 1, 0, -1) if self.depth > 1 and not started.all() else ():
            for name, frames in stacks.items():
                self.seen[name][self.written % self.ring] = observation[name][:, -1 - min(earlier, frames - 1)]
            self._write_nothing(self.depth - 1 - earlier)
        self.broken = False

    def _write_nothing(self, age: Tensor | int) -> None:
        """Append a row without valid steps."""
        row = self.written % self.ring
        self.flags["valid"][row] = self.flags["final"][row] = False
        self.flags["boundary"][row] = True
        self.flags["age"][row] = age
        self._advance(self.width)

    def _by_island(self, flags: Tensor) -> NDArray[np.int64]:
        """The numbers [..., I] of flags [..., N] that are set."""
        counts: NDArray[np.int64] = flags.unflatten(-1, (self.islands, self.width)).sum(-1).numpy()
        return counts

    def _advance(self, invalid: NDArray[np.int64] | int) -> None:
        """Count a row that was written, with so many invalid steps [I], and drop the oldest row if the ring is full."""
        self._invalid[self.written % self.ring] = invalid
        self.gaps += invalid
        self.written += 1
        if self.written - self.rows > self.oldest:
            self.gaps -= self._invalid[self.oldest % self.ring]
            self.oldest += 1

    def _keep_final(self, lanes: Tensor) -> None:
        """Copy the last observations of `lanes` [N] to the second ring, before they are overwritten."""
        if not is_host(lanes.device):
            # Those of other lanes are copied too, and are not read: finding out how many there are would take longer.
            for name, data in self._data.items():
                finals = data[self.size + 1 :].view_as(self.seen[name])
                finals[self.newest_row] = self.seen[name][self.written % self.ring]
            self.flags["final"][self.newest_row] = lanes
            return
        lane = lanes.nonzero()[:, 0].to(self.device)
        index = self.newest_row * self.lanes + lane
        for name, data in self._data.items():
            data[self.size + 1 + index] = self.seen[name][self.written % self.ring][lane]
        self._flat["final"][index] = True

    def gather(self, index: Tensor) -> Transitions:
        """The transitions at `index` [...], with all columns."""
        return Transitions(
            self.observation(index), self.next_observation(index), self.gather_columns(index, self.columns)
        )

    def gather_columns(self, index: Tensor, names: Iterable[str]) -> Tensors:
        """Gather the named columns and flags [..., ...] at `index` [...]."""
        flat, shape = index.reshape(-1), index.shape
        columns = {name: self._flat[name].index_select(0, flat) for name in names}
        return {name: values.view(*shape, *values.shape[1:]) for name, values in columns.items()}

    def observation(self, index: Tensor) -> Tensors:
        """Gather the observations [..., ...] at `index` [...]."""
        return self._gather_parts(index, lambda flat, frames: self._stack_index(flat, frames) if frames else flat)

    def next_observation(self, index: Tensor) -> Tensors:
        """Gather the next observations [..., ...] at `index` [...], including final observations of episodes."""

        def frame_index(flat: Tensor, frames: int) -> Tensor:
            # The next stack is this one without its oldest frame, plus one new frame.
            final = self._flat["final"].index_select(0, flat)
            following = torch.where(final, flat + self.size + 1, self.following(flat, 1)).unsqueeze(-1)
            return torch.cat([self._stack_index(flat, frames - 1), following], -1) if frames else following

        return self._gather_parts(index, frame_index)

    def _gather_parts(self, index: Tensor, frame_index: Callable[[Tensor, int], Tensor]) -> Tensors:
        """Observations at `index` [...], whose frames `frame_index` finds for flat indices [B] and depths of stacks."""
        flat = index.reshape(-1)
        return {
            name: self._data[name]
            .index_select(0, frame_index(flat, part.frames).flatten())
            .view(*index.shape, *part.shape)
            for name, part in self.parts.items()
        }

    def _stack_index(self, index: Tensor, frames: int) -> Tensor:
        """Indices [B, F] of the newest `frames` frames in the stacks at `index` [B], newest last.

        Frames before the episode's first map to the one of zeros.
        """
        if self.depth == 1:
            return index.unsqueeze(-1)[:, :frames]
        ago = torch.arange(frames - 1, -1, -1, device=index.device)
        frame_index = (index.unsqueeze(-1) - ago * self.lanes) % self.size
        return frame_index.masked_fill_(ago > self._flat["age"][index].unsqueeze(-1), self.size)

    def following(self, index: Tensor, steps: Tensor | int) -> Tensor:
        """Indices [...] `steps` [...] later in the same lanes."""
        return (index + steps * self.lanes) % self.size

    def window_end(self, index: Tensor, n: int) -> Tensor:
        """Number of consecutive steps [...] from `index` [...] on, including the first, at most `n`."""
        later = self.following(index.unsqueeze(-1), torch.arange(n, device=self.device))
        cut = self._flat["boundary"].index_select(0, later.view(-1)).view(later.shape)
        cut[..., -1] = True
        until_newest = (self.newest_row - index // self.lanes) % self.ring
        # argmax returns the first of several equal maxima.
        return torch.minimum(cut.byte().argmax(-1), until_newest) + 1

    def window_start(self, index: Tensor, n: int) -> Tensor:
        """Number of consecutive steps [...] that lead to `index` [...], at most `n`."""
        earlier = self.following(index.unsqueeze(-1), -torch.arange(1, n + 1, device=self.device))
        cut = self._flat["boundary"].index_select(0, earlier.view(-1)).view(earlier.shape)
        cut = torch.cat((cut, torch.ones_like(index, dtype=torch.bool).unsqueeze(-1)), -1)
        since_oldest = (index // self.lanes - self.oldest) % self.ring
        return torch.minimum(cut.byte().argmax(-1), since_oldest)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Indices of this shape [..., P, B], drawn uniformly and with replacement from those that can be drawn.

        An agent draws those of its own island. Invalid ones are rejected and drawn again, which leaves all valid ones
        equally likely. Those that `ROUNDS` rounds have left come from a list of the valid ones. Indices are arbitrary
        where an island has none that can be drawn.
        """
        first, count = self.oldest % self.ring * self.lanes, (self.written - self.oldest) * self.width
        *updates, agents, draws = shape

        def drawn(below: int, agents: int = agents) -> Tensor:
            return torch.randint(below, (*updates, agents, draws), generator=generator, device=self.device)

        def drawn_index() -> Tensor:
            return self.index_in_islands(drawn(max(1, count))).add_(first).remainder_(self.size)

        index = drawn_index()
        if not self.gaps.any() or not self.drawable:
            return index
        valid = self._flat["valid"]
        for _ in range(ROUNDS):
            rejected = ~valid[index]
            if not rejected.any():
                return index
            index = torch.where(rejected, drawn_index(), index)
        lists = [self.valid_index(number) for number in range(self.islands)]
        listed = [
            indices[drawn(len(indices), agents // self.islands)] if len(indices) else part
            for indices, part in zip(lists, index.chunk(self.islands, -2), strict=True)
        ]
        return torch.where(valid[index], index, torch.cat(listed, -2))

    def index_in_islands(self, number: Tensor) -> Tensor:
        """The indices [..., P, B] of steps that have these numbers [..., P, B] within the islands of P agents."""
        if self.islands == 1:
            return number
        agents = number.shape[-2]
        island = torch.arange(agents, device=number.device).unsqueeze(-1) // (agents // self.islands)
        return number // self.width * self.lanes + island * self.width + number % self.width

    def valid_index(self, island: int | None = None) -> Tensor:
        """All indices [B] that can be drawn, or those of one island, oldest first."""
        numbers = torch.arange(self.oldest * self.lanes, self.written * self.lanes, device=self.device)
        index = numbers.remainder_(self.size)
        valid = self._flat["valid"][index]
        return index[valid if island is None else valid & (index % self.lanes // self.width == island)]

    def state_dict(self) -> Tensors:
        """Written rows of the ring, its counters, and the L observations of the second ring [L, ...], as `last.`."""
        rows = {name: values[: rows_held(self.written, self.ring)] for name, values in self._stores().items()}
        at = self.size + 1 + rows["final"].flatten().nonzero()[:, 0]
        last = {f"last.{name}": data.index_select(0, at) for name, data in self._data.items()}
        return rows | last | numbers_to_tensors(**{name: int(getattr(self, name)) for name in COUNTERS})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict` of a storage of the same shape. Raises UserError for another one."""
        written, oldest, broken = self._checked(tensors)
        self.clear()
        if not written:
            return
        self.written, self.oldest, self.broken = written, oldest, bool(broken)
        row_count = rows_held(written, self.ring)
        for name, values in self._stores().items():
            values[:row_count] = tensors[name].to(self.device)
        at = self.size + 1 + tensors["final"].flatten().nonzero()[:, 0].to(self.device)
        for name, data in self._data.items():
            data[at] = tensors[f"last.{name}"].to(self.device)
        valid = tensors["valid"].cpu()
        self._invalid[:row_count] = self._by_island(~valid)
        self.gaps = self._invalid[np.arange(self.oldest, self.written) % self.ring].sum(0)
        self._was_valid = valid[self.newest_row].clone()

    def _stores(self) -> Tensors:
        """All tensors [T, N, ...] by their names in a state."""
        seen = {f"observation.{name}": values for name, values in self.seen.items()}
        return seen | {f"column.{name}": values for name, values in self.columns.items()} | self.flags

    def _checked(self, tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """`written`, `oldest` and `broken` of a state. Raises UserError unless it fits these parts and columns."""
        counters = {name: tensors[name] for name in COUNTERS if name in tensors}
        check_tensors(counters, dict.fromkeys(COUNTERS, ((), torch.int64)), WHERE)
        rows, lanes, written, oldest, broken = (int(counters[name]) for name in COUNTERS)
        if (rows, lanes) != (self.rows, self.lanes):
            raise UserError(f"{WHERE}: has {rows} rows of {lanes} environments, not {self.rows} rows of {self.lanes}")
        if not max(0, written - rows) <= oldest <= written:
            raise UserError(f"{WHERE}: invalid state: {written} rows from {oldest} on, in a ring of {rows} rows")
        row_count, last = rows_held(written, self.ring), int(tensors.get("final", torch.zeros(0)).sum())
        expected = {name: ((row_count, *values.shape[1:]), values.dtype) for name, values in self._stores().items()}
        expected |= {f"last.{name}": ((last, *data.shape[1:]), data.dtype) for name, data in self._data.items()}
        check_tensors(tensors, expected | dict.fromkeys(COUNTERS, ((), torch.int64)), WHERE)
        return written, oldest, broken


def make_replay(
    capacity: int,
    lanes: int,
    interface: EnvSpec,
    action: Field,
    device: torch.device,
    ranks_on_host: int = 1,
    islands: int = 1,
) -> Storage:
    """Allocate a storage of `capacity` transitions from `lanes` environments, at least one row of them.

    Raises UserError if memory is insufficient.
    """
    parts = interface.with_mask()
    columns: dict[str, Field] = {"action": action, "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    rows = max(1, capacity // lanes)
    on_cpu = device.type == "cpu"
    size = Storage(rows, lanes, parts, columns, torch.device("meta")).memory(second_ring=not on_cpu)
    check_room(size, "replay.capacity", device=device, processes=ranks_on_host if on_cpu else 1)
    return Storage(rows, lanes, parts, columns, device, islands=islands)
