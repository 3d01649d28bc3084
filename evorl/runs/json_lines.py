"""Histories of a run as files of JSON lines, `metrics.jsonl` and `lineage.jsonl`, which a resume cuts back."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from evorl.system.files import (
    open_file,
    parse_json,
    read_lines,
    read_lines_backwards,
    refuse_links,
    sync_directory,
    write_atomically,
)
from evorl.types import EvorlWarning

Row = dict[str, Any]
DECODER = json.JSONDecoder()


class JsonLines:
    """A `.jsonl` file whose objects have a `generation`. Lines that could not be written are retried on next flush."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue lines, to be written by the next `flush` that succeeds."""
        self._waiting += [(json.dumps(row) + "\n").encode() for row in rows]

    def flush(self) -> None:
        """Write queued lines and fsync. Raises OSError; the file then ends as before."""
        if not self._waiting:
            return
        # Unbuffered: closing a buffered file would write the rest after a partial line had been truncated.
        with open_file(self.path, "ab") as file:
            end = file.tell()
            try:
                rest = memoryview(b"".join(self._waiting))
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
                if end == 0:
                    sync_directory(self.path.parent)  # Otherwise the new directory entry could be lost.
                self._waiting.clear()
            except BaseException:  # Signals too: what they interrupt is written again.
                if self._waiting:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                raise

    def rows(self) -> Iterator[Row]:
        """Yield the objects of all complete lines lazily; nothing if there is no file."""
        if self.path.exists():
            yield from (row for line in read_lines(self.path) if (row := row_of(line)) is not None)

    def backwards(self) -> Iterator[Row]:
        """Yield the objects of all complete lines lazily, the last one first."""
        if self.path.exists():
            yield from (row for line in read_lines_backwards(self.path) if (row := row_of(line)) is not None)

    def newest(self, count: int) -> list[Row]:
        """The objects of the last `count` complete lines at most, in file order."""
        return list(islice(self.backwards(), count))[::-1]

    def last(self) -> Row | None:
        """The object of the last complete line, or None."""
        return next(iter(self.newest(1)), None)

    def members(self, *names: str) -> Iterator[Row]:
        """Yield the objects of all complete lines with these members, as `members_at` does."""
        yield from (row for _, row in self.members_at(names))

    def members_at(self, names: Collection[str]) -> Iterator[tuple[int, Row]]:
        """Yield the byte offset and object of each complete line, decoded only up to the last of these members.

        This is fast if they come first. What follows them is not validated; a line that lacks one is decoded whole.
        """
        offset = 0
        for line in read_lines(self.path) if self.path.exists() else ():
            if (row := members_of(line, names)) is not None:
                yield offset, row
            offset += len(line)

    def at(self, offset: int, names: Collection[str]) -> Row:
        """The object of the line at a byte offset, with these members. Raises ValueError if there is none."""
        row = members_of(next(read_lines(self.path, offset), b""), names)
        if row is None:
            raise ValueError(f"{self.path}: has changed while it was read")
        return row

    def cut_back(self, generation: int) -> None:
        """Drop damaged lines, and lines of generations after `generation`, which a resumed run trains again.

        Warns about generations up to `generation` that have no line.
        """
        refuse_links(self.path)
        there: set[int] = set()

        def kept() -> Iterator[bytes]:
            for line in read_lines(self.path):
                row = row_of(line)
                if row is not None and row["generation"] <= generation:
                    there.add(row["generation"])
                    yield line

        if self.path.exists():
            write_atomically(self.path, kept())
        if lost := list(islice((number for number in range(1, generation + 1) if number not in there), 6)):
            named = ", ".join(map(str, lost[:5])) + (" ..." if len(lost) > 5 else "")
            warnings.warn(
                f"{self.path}: has no line for generation {named}; it was damaged", EvorlWarning, stacklevel=2
            )


def row_of(line: bytes) -> Row | None:
    """The object in a line, or None if the line is damaged, incomplete, or has no generation."""
    with contextlib.suppress(ValueError, RecursionError):
        row = parse_json(line)
        if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("generation"), int):
            return row
    return None


def members_of(line: bytes, names: Collection[str]) -> Row | None:
    """The members of a line's object up to the last of `names`, or None where `row_of` would.

    If the line lacks one of them, this is the whole object. What follows the last of them is not validated.
    """
    if not line.endswith(b"}\n"):
        return row_of(line)
    row: Row = {}
    left = {"generation", *names}
    decode, discard = DECODER.raw_decode, left.discard
    with contextlib.suppress(ValueError, IndexError, RecursionError):
        text, place, mark = line.decode(), 0, "{"
        while left and text[place] == mark:
            mark = ","
            # json.dumps writes at most one space after a separator.
            name, place = decode(text, place + 2 if text[place + 1] == " " else place + 1)
            if not isinstance(name, str) or text[place] != ":":
                return row_of(line)
            row[name], place = decode(text, place + 2 if text[place + 1] == " " else place + 1)
            discard(name)
        if not left and isinstance(row["generation"], int):
            return row
    return row_of(line)
