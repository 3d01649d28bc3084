"""The lines that a run writes as it goes, one JSON object each, and that a resumed run takes back."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from evorl.system.files import read_bounded, refuse_links, sync_directory, write_atomically
from evorl.types import EvorlWarning


class JsonLines:
    """A `.jsonl` file whose objects have a `generation`. Lines that could not be written wait for the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add lines, to be written by the next `flush` that succeeds."""
        self._waiting += [(json.dumps(row) + "\n").encode() for row in rows]

    def flush(self) -> None:
        """Write what waits and see that the disk has it. Raises OSError; the file then ends as it did before."""
        if not self._waiting:
            return
        # Without a buffer, whose rest would be written when the file is closed, after half a line was taken back.
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                rest = memoryview(b"".join(self._waiting))
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
                if end == 0:
                    sync_directory(self.path.parent)  # Or the new file's name could be lost.
                self._waiting.clear()
            except BaseException:  # Also a signal: what it interrupts will be written again.
                if self._waiting:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                raise

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of all whole lines."""
        return [row for _, row in self._rows()]

    def cut_back(self, generation: int) -> None:
        """Drop what is of generations after `generation`, which are re-run after resume, and what is damaged."""
        refuse_links(self.path)
        kept = [(line, row) for line, row in self._rows() if row["generation"] <= generation]
        if self.path.is_file():
            write_atomically(self.path, b"".join(line for line, _ in kept))
        there = {row["generation"] for _, row in kept}
        if lost := list(islice((number for number in range(1, generation + 1) if number not in there), 6)):
            named = ", ".join(map(str, lost[:5])) + (" ..." if len(lost) > 5 else "")
            warnings.warn(
                f"{self.path}: holds nothing of generation {named}; it was damaged", EvorlWarning, stacklevel=2
            )

    def _rows(self) -> list[tuple[bytes, dict[str, Any]]]:
        if not self.path.is_file():
            return []
        rows = []
        for line in read_bounded(self.path).splitlines(keepends=True):
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("generation"), int):
                    rows.append((line, row))
        return rows
