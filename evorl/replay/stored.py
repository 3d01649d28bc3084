"""Checkpointed storages: validating state, and restoring into storages of another shape.

Axes: T rows of the ring; N and M streams; L true last observations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.slots import Integers
from evorl.system.formats import check_tensors
from evorl.types import Tensors, UserError

if TYPE_CHECKING:
    from evorl.replay.storage import Storage

WHERE = "the replay"
PIECE = 128
"""Streams are cut into pieces of at most this many rows when their number changes."""
MOST = 2**60
"""Upper bound on rows, streams and slots ever written."""


def rows_held(written: int, ring: int) -> int:
    """Return the number of rows of the ring in use, including the one ahead of the newest."""
    return min(written + 1, ring) if written else 0


def last_numbers(slots: Tensor, written: int, ring: int, streams: int) -> Integers:
    """Return the slot numbers [L], counted from the start of the storage, of ring `slots` [L].

    The newest row holds the latest numbers.
    """
    slots_ = slots.cpu().numpy()
    rows = written - 1 - (written - 1 - slots_ // streams) % ring
    return np.asarray(rows * streams + slots_ % streams, dtype=np.int64)


def _state(storage: Storage) -> tuple[Tensors, dict[str, int]]:
    """Return the written rows of the ring and its counters for a checkpoint."""
    held = rows_held(storage.written, storage.ring)
    tensors = {name: values[:held] for name, values in _stores(storage)}
    if storage.store_next:
        last, tensors["last_slots"] = storage.last_observations()
        tensors |= {f"last.{name}": values for name, values in last.items()}
    numbers = ("rows", "streams", "written", "oldest", "broken")
    return tensors, {name: int(getattr(storage, name)) for name in numbers}


def _load(storage: Storage, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a checked state into a storage whose counters are those of the state."""
    held = rows_held(storage.written, storage.ring)
    for name, values in _stores(storage):
        values[:held] = tensors[name].to(storage.device)
    if not (storage.store_next and len(tensors["last_slots"])):
        return
    numbers = last_numbers(tensors["last_slots"], storage.written, storage.ring, storage.streams)
    rows = numbers // storage.streams
    edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
    for start, stop in itertools.pairwise(edges):
        parts = {name: tensors[f"last.{name}"][start:stop] for name in storage.parts}
        storage.keep_last(int(rows[start]), numbers[start:stop] % storage.streams, parts)


def _stores(storage: Storage) -> list[tuple[str, Tensor]]:
    """Return all tensors [T, N, ...] with their names in a state."""
    seen = [(f"observation.{name}", values) for name, values in storage.seen.items()]
    columns = [(f"column.{name}", values) for name, values in storage.columns.items()]
    return [*seen, *columns, *storage.flags.items()]


def _check(storage: Storage, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
    """Raise UserError unless the state fits a storage of these parts and columns."""
    rows, streams, written, oldest, broken = (
        numbers.get(name, -1) for name in ("rows", "streams", "written", "oldest", "broken")
    )
    fine = 1 <= rows <= MOST and 1 <= streams <= MOST and 0 <= written <= MOST // streams and broken in (0, 1)
    if not fine or not max(0, written - rows) <= oldest <= written or not (written or broken):
        raise UserError(
            f"{WHERE}: {written} rows from {oldest} on in a ring of {rows} for {streams} streams are no state of one"
        )
    ring = rows + storage.depth
    held = rows_held(written, ring)
    last = len(tensors["last_slots"]) if "last_slots" in tensors and tensors["last_slots"].dim() else 0
    check_tensors(tensors, _expected(storage, held, streams, last), WHERE)
    for name in ("valid", "boundary"):
        if (tensors[name].view(torch.uint8) > 1).any():
            raise UserError(f"{WHERE}: tensor {name!r} holds what is neither true nor false")
    if not held:
        return
    valid = tensors["valid"].cpu().numpy()
    newest = np.flatnonzero(valid[(written - 1) % ring]) if written > oldest else np.zeros(0, dtype=np.int64)
    if storage.depth > 1:
        _check_ages(tensors["age"].cpu().numpy().astype(np.int64), written, held, storage.depth)
    if storage.store_next:
        slots = tensors["last_slots"].cpu().numpy()
        of = last_numbers(tensors["last_slots"], written, ring, streams)
        inside = ((slots >= 0) & (slots < held * streams) & (of >= oldest * streams)).all()
        if not inside or (np.diff(of) <= 0).any() or not valid.reshape(-1)[slots].all():
            raise UserError(f"{WHERE}: tensor 'last_slots' holds slots that leave no true last observation")
        # The newest row's next observations stay in the row ahead until the stream is broken.
        wanted = newest + (written - 1) * streams if broken else newest[:0]
        if not np.array_equal(of[of >= (written - 1) * streams], wanted):
            raise UserError(f"{WHERE}: tensor 'last_slots' does not fit the row that was written last")


def _expected(storage: Storage, held: int, streams: int, last: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor of a state."""
    expected = {f"column.{name}": ((held, streams, *shape), dtype) for name, (shape, dtype) in storage.fields.items()}
    expected |= {name: ((held, streams), values.dtype) for name, values in storage.flags.items()}
    for name, part in storage.parts.items():
        shape = part.shape[1:] if part.frames else part.shape
        expected[f"observation.{name}"] = (held, streams, *shape), part.dtype
        if storage.store_next:
            expected[f"last.{name}"] = (last, *shape), part.dtype
    return expected | ({"last_slots": ((last,), torch.int64)} if storage.store_next else {})


def _check_ages(age: Integers, written: int, held: int, depth: int) -> None:
    """Raise UserError unless stacks [T, N] grow by one frame per row and never show a row that was not written."""
    first = max(0, written + 1 - held)
    age = age[np.arange(first, written) % held]
    grown = np.minimum(age[:-1] + 1, depth - 1)
    most = 0 if first == 0 else depth - 1
    if (age[0] > most).any() or ((age[1:] != 0) & (age[1:] != grown)).any():
        raise UserError(f"{WHERE}: tensor 'age' shows stacks of frames that never followed each other")


def _append(source: Storage, target: Storage) -> None:
    """Append the drawable rows of `source`, with M streams, to `target`, with N, oldest first.

    If M differs from N, each source stream is cut into pieces that fill the target's streams.
    """
    for stream, first, last in _blocks(source, target):
        target.break_streams()
        for step in range(int((last - first).max())):
            _append_row(source, target, stream, first + step, inside=first + step < last, going_on=step > 0)
    target.break_streams()


def _append_row(
    source: Storage, target: Storage, stream: Integers, row: Integers, *, inside: NDArray[np.bool_], going_on: bool
) -> None:
    """Append rows `row` [N] of `stream` [N] of the source as one target row, where they are `inside` [N]."""
    slots = torch.from_numpy(np.where(inside, row % source.ring * source.streams + stream, 0))
    before = (slots - source.streams) % source.slots
    if source.depth > 1:
        started = source.flags["age"].view(-1)[slots] == 0
    elif source.store_next and going_on:
        started = source.links[before] >= source.slots
    else:
        started = torch.zeros(len(slots), dtype=torch.bool)
    # The row after a piece does not continue it.
    started |= torch.from_numpy(~inside)
    found = source.gather(slots)
    target.write(
        found.observation,
        found.columns,
        next_observation=found.next_observation,
        valid=source.flags["valid"].view(-1)[slots] & torch.from_numpy(inside),
        started=started,
        ended=source.flags["boundary"].view(-1)[slots].to(target.device),
    )


def _blocks(source: Storage, target: Storage) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Yield the source stream [N] for each target stream, with its first and last row [N], in row order."""
    count, streams = target.streams, source.streams
    # Skip rows that would be overwritten immediately.
    oldest = max(source.oldest, source.written - math.ceil(target.rows * count / streams))
    if source.written == oldest:
        return
    cuts = 1
    if count != streams:
        # The number of cuts is a multiple of this, so that the pieces fill all streams of the target.
        unit = count // math.gcd(count, streams)
        cuts = unit * math.ceil((source.written - oldest) / (unit * PIECE))
    edges = np.linspace(oldest, source.written, cuts + 1).astype(np.int64)
    piece = np.arange(cuts * streams)
    for at in range(0, len(piece), count):
        chosen = piece[at : at + count]
        stream, part = chosen % streams, chosen // streams
        yield (
            np.resize(stream, count),
            np.pad(edges[part], (0, count - len(part))),
            np.pad(edges[part + 1], (0, count - len(part))),
        )
