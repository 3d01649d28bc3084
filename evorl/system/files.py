"""Files that are whole or not there, and a lock on a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from io import DEFAULT_BUFFER_SIZE, BufferedReader, FileIO
from pathlib import Path
from typing import IO, Any

from evorl.system.memory import check_room
from evorl.types import UserError

MAX_LINE = 2**27
"""Bytes of the longest line that is read; the metrics of 65,536 agents take some 80 MB."""
BLOCK = 2**18
"""Bytes that are read at a time from a file of lines."""
FIRST_BLOCK = 2**16
"""Bytes that are read first from the end of a file."""


def write_atomically(path: Path, payload: bytes | Iterable[bytes]) -> None:
    """Write a payload, or its parts one by one, so that the file is seen whole or not at all, also after a crash."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)  # It could be a link, through which another file would be overwritten.
    write_through(temporary, payload)
    temporary.replace(path)
    sync_directory(path.parent)


def write_through(path: Path, payload: bytes | Iterable[bytes]) -> None:
    """Write and wait until the disk has it."""
    with path.open("wb") as file:
        file.writelines([payload] if isinstance(payload, bytes) else payload)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file that a person can read."""
    write_atomically(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return JSON that a person can read; equal values give equal bytes."""
    return (json.dumps(value, indent=2) + "\n").encode()


def make_directory(path: Path, fresh: bool = False) -> None:
    """Make a directory and those above it, so that they last. Raises FileExistsError where it should be `fresh`."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing[1:]):
        directory.mkdir(exist_ok=True)
    if missing or fresh:
        path.mkdir(exist_ok=not fresh)
    for made in missing:
        sync_directory(made.parent)


def remove(path: Path) -> None:
    """Remove whatever is there, as far as that can be done: opening a pipe, as `rmtree` does, would wait for ever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def settle(*directories: Path) -> None:
    """Make the names in these directories last that whoever was killed here may have left to chance."""
    for directory in directories:
        if directory.is_dir():
            sync_directory(directory)


def reason(error: OSError, path: Path) -> str:
    """Return where and why the system refused; for a lock it does not say where."""
    return f"{error.filename or path}: {error.strerror}"


def sync_directory(path: Path) -> None:
    """Make renames inside a directory last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def entry(payload: bytes) -> dict[str, Any]:
    """Return a manifest's entry for a file with these bytes."""
    return {"size": len(payload), "sha256": digest(payload)}


def entry_of(path: Path) -> dict[str, Any]:
    """Return a manifest's entry for this file, which is read piece by piece. Raises OSError."""
    with _open(path) as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_bounded(path: Path) -> bytes:
    """Return all bytes of a file that memory has room for. Raises OSError, and UserError where it is too large."""
    with _open(path) as file:
        check_room(os.fstat(file.fileno()).st_size, str(path))
        try:
            return file.read()
        except MemoryError as error:  # There may be a limit that nothing tells of beforehand.
            raise UserError(f"{path}: does not fit into the memory that there is") from error


def read_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from an offset on, one by one, with their ends; the last one may have none.

    Raises OSError, and UserError where a line is longer than `MAX_LINE`.
    """
    with _open(path, BLOCK) as file:
        file.seek(offset)
        while line := file.readline(MAX_LINE + 1):
            _check_line(path, len(line))
            yield line


def read_lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file as `read_lines` does, the last one first: for one line, only the file's end is read."""
    with _open(path, BLOCK) as file:
        place, rest = os.fstat(file.fileno()).st_size, b""
        while place:
            # Twice as much each time, so that a long line is not joined from many blocks.
            size = min(place, max(FIRST_BLOCK, len(rest)))
            place -= size
            file.seek(place)
            *whole, last = (file.read(size) + rest).split(b"\n")
            lines = [*(line + b"\n" for line in whole), *([last] if last else [])]
            rest = lines.pop(0) if place else b""
            _check_line(path, max(map(len, [rest, *lines])))
            yield from reversed(lines)


def _check_line(path: Path, length: int) -> None:
    if length > MAX_LINE:
        raise UserError(f"{path}: has a line of more than {MAX_LINE / 2**20:.0f} MiB, which no run writes")


def _open(path: Path, buffer: int = DEFAULT_BUFFER_SIZE) -> BufferedReader:
    """Open for reading what is a file. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):  # Opening a pipe would wait for its other end.
        raise OSError(errno.EINVAL, "not a file", str(path))
    return BufferedReader(FileIO(path), buffer)


def refuse_links(*paths: Path) -> None:
    """Raise UserError where one of the paths is a symbolic link, by which a directory could reach out of itself."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link, which a run's directory may not hold; put the real one there")


class Lock:
    """A lock on a directory that one process holds until it ends, however it ends.

    It is a POSIX record lock on the file `.lock`: the system gives it back when the process dies, and forked children
    do not inherit it. The file says who was last let in.
    """

    def __init__(self, directory: Path, wait: float) -> None:
        """Take the lock. Raises UserError where another process keeps it for `wait` seconds."""
        self.path = directory / ".lock"
        refuse_links(self.path)
        self._file: IO[str] = self.path.open("a+", encoding="utf-8")
        deadline = time.monotonic() + wait
        while not self._taken():
            if time.monotonic() > deadline:
                holder = read_owner(directory)
                self._file.close()
                raise UserError(
                    f"run.name: {directory} is in use by process {holder.get('pid', '?')} on "
                    f"{holder.get('host', 'an unknown host')}; wait for its end or choose another name"
                )
            time.sleep(0.1)

    def sign(self, owner: dict[str, Any]) -> None:
        """Note who uses the directory from now on."""
        self._file.truncate(0)
        self._file.write(json.dumps(owner))
        self._file.flush()
        os.fsync(self._file.fileno())  # Or other hosts would not see whose it is.
        sync_directory(self.path.parent)

    def release(self) -> None:
        """Give the lock back."""
        self._file.close()

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


def is_locked(directory: Path) -> bool:
    """Return whether another process holds the lock on a directory."""
    try:
        with _open(directory / ".lock") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


def size_of(path: Path) -> int:
    """Return the bytes of all files in a directory, without those that links lead to."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # A run that trains removes its older checkpoints.
                size += (Path(folder) / name).lstat().st_size
    return size


def read_owner(directory: Path) -> dict[str, Any]:
    """Return who holds the lock on a directory or held it last; empty where that is not known."""
    try:
        with _open(directory / ".lock") as file:
            owner = json.loads(file.read(10_000))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}
