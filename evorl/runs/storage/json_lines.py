"""Histories of a run as files of JSON lines, `metrics.jsonl` and `lineage.jsonl`, which a resume cuts back."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from evorl.system.files import (
    open_file,
    read_lines,
    sync_directory,
    write_atomically,
)
from evorl.types.outcomes import EvorlWarning

Row = dict[str, Any]


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
        """Yield the objects of all complete lines, the last one first; those not asked for are not parsed."""
        if self.path.exists():
            yield from (row for line in reversed([*read_lines(self.path)]) if (row := row_of(line)) is not None)

    def newest(self, count: int) -> list[Row]:
        """The objects of the last `count` complete lines at most, in file order."""
        return list(islice(self.backwards(), count))[::-1]

    def last(self) -> Row | None:
        return next(iter(self.newest(1)), None)

    def cut_back(self, generation: int) -> None:
        """Drop damaged lines, and lines of generations after `generation`, which a resumed run trains again.

        Warns about generations up to `generation` that have no line.
        """
        there: set[int] = set()

        def intact() -> Iterator[bytes]:
            for line in read_lines(self.path):
                row = row_of(line)
                if row is not None and row["generation"] <= generation:
                    there.add(row["generation"])
                    yield line

        if self.path.exists():
            write_atomically(self.path, intact())
        if lost := list(islice((number for number in range(1, generation + 1) if number not in there), 6)):
            named = ", ".join(map(str, lost[:5])) + (" ..." if len(lost) > 5 else "")
            warnings.warn(
                f"{self.path}: has no line for generation {named}; it was damaged", EvorlWarning, stacklevel=2
            )


def row_of(line: bytes) -> Row | None:
    """The object in a line, or None if the line is damaged, incomplete, or has no generation."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("generation"), int):
            return row
    return None
