"""Atomic file writes, reads that never follow links, and a lock on a directory.

All files of a run's directory, and all files that commands write, are opened here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

from evorl.types.outcomes import UserError

WANDB = "wandb"
"""The directory that W&B creates in a run's directory."""
CHECKPOINTS = "checkpoints"


def check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no directory {path.parent}")


def write_atomically(path: Path, payload: bytes | Iterable[bytes]) -> None:
    """Write a payload, or its parts in order, so that the file appears complete or not at all, even after a crash.

    Raises OSError.
    """
    with replacing(path) as file:
        file.writelines([payload] if isinstance(payload, bytes) else payload)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write alone, which does not know the name of its file."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that atomically replaces `path` when closed; after an exception `path` is unchanged.

    Raises OSError if `path` is a link, a pipe, a device or a directory.
    """
    _refuse_special(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with BufferedWriter(open_file(temporary, "xb")) as buffer:
            yield buffer
            buffer.flush()
            os.fsync(buffer.fileno())
            temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            with contextlib.suppress(AttributeError):  # PyAV's own errors do not take a name.
                error.filename = str(path)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Indented JSON; equal values give equal bytes."""
    return (json.dumps(value, indent=2) + "\n").encode()


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises OSError and ValueError."""
    try:
        return json.loads(read_bytes(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none that can be read. Raises OSError for what is no file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
        value = read_json(path)
        return value if isinstance(value, dict) else {}
    return {}


def make_directory(path: Path, fresh: bool = False) -> None:
    """Create a directory and its parents, durably. Raises FileExistsError if it exists and must be `fresh`."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing[1:]):
        directory.mkdir(exist_ok=True)
    if missing or fresh:
        path.mkdir(exist_ok=not fresh)
    for made in missing:
        sync_directory(made.parent)


def make_subdirectory(path: Path) -> None:
    """Create a directory in one that exists, durably: nothing is written where a run was moved away or removed.

    Raises FileNotFoundError if the outer directory is missing, UserError if the directory is a link.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        sync_directory(path.parent)
    refuse_links(path)


def identity(path: Path) -> tuple[int, int] | None:
    """The device and inode of a file, or None if there is none. Raises OSError."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def remove(path: Path) -> None:
    """Remove a path of any kind, ignoring errors; unlike `rmtree`, it never opens a pipe, which would block forever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def reason(error: OSError, path: Path | str) -> str:
    """The path, or else the setting, and the reason of an OSError; lock errors do not name the path themselves."""
    more = "; raise the limit with `ulimit -n 65536`" if error.errno == errno.EMFILE else ""
    return f"{error.filename or path}: {error.strerror or error}{more}"


@contextlib.contextmanager
def file_errors(path: Path | str, words: str = "") -> Iterator[None]:
    """Raise a UserError in place of an OSError: these `words`, the path that it names or else this one, the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{words}{reason(error, path)}") from error


def sync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def entry(payload: bytes) -> dict[str, Any]:
    return {"size": len(payload), "sha256": digest(payload)}


def read_bytes(path: Path) -> bytes:
    """Read a whole file. Raises OSError."""
    with _open(path) as file:
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, with their line ends; the last one may have none. Raises OSError."""
    with _open(path) as file:
        yield from file


def _open(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, also for a link, a pipe or a device."""
    return BufferedReader(open_file(path, "rb"))


def open_file(path: Path, mode: Literal["rb", "r+b", "xb", "ab", "a+b"]) -> FileIO:
    """Open a file without a buffer. Raises OSError, also for a link, a pipe or a device."""
    _refuse_special(path)
    file = open(path, mode, buffering=0, opener=_no_link)  # noqa: SIM115 (a path's own `open` takes no opener)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file", str(path))
    return file


def _no_link(path: str, flags: int) -> int:
    """Open without following links or blocking on pipes, in case the path was replaced since it was checked."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _refuse_special(path: Path) -> None:
    """Raise OSError if the path exists and is not a regular file."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise OSError(errno.ELOOP, "a symbolic link, which is not followed", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a file", str(path))


def refuse_links(*paths: Path) -> None:
    """Raise UserError if one of the paths is a symbolic link, which could lead out of the run's directory."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link, which a run's directory may not hold; put the real one there")


def refuse_links_within(run: Path) -> None:
    """Raise UserError if a run's directory contains a link, a pipe or a device at any depth.

    Exempt is what W&B has in its own directory, which evorl never opens, and what checkpoints have: their files are
    checked one by one when they are used, and a damaged checkpoint is no reason to refuse the one before it.
    """
    folders = [run]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    refuse_links(path)
                    if not entry.is_dir(follow_symlinks=False):
                        if not entry.is_file(follow_symlinks=False):
                            raise UserError(f"{path}: is neither a file nor a directory; a run has nothing else")
                    elif path not in (run / CHECKPOINTS, run / WANDB):
                        folders.append(path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # A training run may be replacing files.
        except OSError as error:
            raise UserError(f"{reason(error, run)}: every directory of a run must be readable") from error


LOCK = ".lock"
"""The file in a directory that its lock is on."""
_held: weakref.WeakSet[Lock] = weakref.WeakSet()
"""The locks held by this process."""


class Lock:
    """An exclusive lock on a directory, held until the process releases it or ends, however it ends.

    It uses flock(2) on the file `.lock`, so it belongs to this open file and not to the process: a POSIX record lock
    would be lost as soon as the process closes any other descriptor of that file, such as one used to read the owner.
    The system releases it with the last copy of the descriptor. Programs started by this process get no copy, and a
    forked child closes its own immediately: an environment's process that outlives its rank keeps no lock. Over NFS,
    Linux turns it into a server lock that other hosts see.
    The file records the last owner.
    """

    def __init__(self, directory: Path, wait: float) -> None:
        """Acquire the lock. Raises UserError if another process holds it for `wait` seconds, and OSError."""
        self.path = directory / LOCK
        self._file = open_file(self.path, "a+b")
        _held.add(self)
        deadline = time.monotonic() + wait
        try:
            while not _flock(self._file, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    holder = read_object(self.path)
                    raise UserError(
                        f"run.name: {directory} is in use by process {holder.get('pid', '?')} on "
                        f"{holder.get('host', 'an unknown host')}; wait for its end or choose another name"
                    )
                time.sleep(0.1)
        except BaseException:
            self._file.close()
            raise

    def sign(self, owner: dict[str, Any]) -> None:
        """Record the new owner of the directory."""
        with open_file(self.path, "r+b") as file:
            # In one write, padded over the previous owner: a signal, or a reader, between two would find none.
            file.write(json.dumps(owner).encode().ljust(os.fstat(file.fileno()).st_size))
            os.fsync(file.fileno())  # Otherwise other hosts would not see the owner.
        sync_directory(self.path.parent)

    def release(self) -> None:
        """Release the lock, even if another process still has a copy of its descriptor."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def _close_copies() -> None:
    """Close a forked child's copies of the descriptors; the process that it inherited them from keeps the locks."""
    for lock in _held:
        lock._file.close()


os.register_at_fork(after_in_child=_close_copies)


def _flock(file: FileIO | BufferedReader, kind: int) -> bool:
    """Try to acquire a lock of this kind; return whether no conflicting lock is held. Raises OSError."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(directory: Path) -> bool:
    """True if a process holds the lock on a directory; False if the lock file cannot be opened."""
    try:
        with _open(directory / LOCK) as file:
            return not _flock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def size_of(path: Path) -> int:
    """The total size in bytes of all files in a directory, without following links."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # A training run may be removing old checkpoints.
                size += (Path(folder) / name).lstat().st_size
    return size
