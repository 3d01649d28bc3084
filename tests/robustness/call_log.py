"""A log of every call by which this process changes what lies below a directory."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from lossy_disk import ROOT, Call, Entries, Node, Sync, Tree, Truncate, World, Write

from evorl.runs.directory import Checkpoints

PathLike = str | os.PathLike[str]
Identity = tuple[int, int]


def tree_of(directory: Path) -> Tree:
    """Read what lies below a directory. Raises ValueError for what is neither file nor directory."""
    tree: dict[str, bytes | None] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ValueError(f"{path}: of such the log tells nothing")
        tree[str(path.relative_to(directory))] = None if path.is_dir() else path.read_bytes()
    return tree


def lay_out(tree: Tree, directory: Path) -> None:
    """Make a directory with this tree below it."""
    directory.mkdir(parents=True)
    for path, payload in sorted(tree.items()):
        if payload is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(payload)


class RecordedFile(io.FileIO):
    """A file without a buffer, each write of which is a call to the system, that tells of them."""

    def __init__(self, log: CallLog, path: PathLike, mode: str) -> None:
        place = log.place(path)
        assert place is not None
        super().__init__(os.fspath(path), mode)
        self._log = log
        self._appends = "a" in mode
        self._node = log.opened(place, os.fstat(self.fileno()), empties="w" in mode)

    def write(self, payload: Any, /) -> int:
        offset = os.fstat(self.fileno()).st_size if self._appends else self.tell()
        written = super().write(payload)
        self._log.add(Write(self._log.told("write", self._node), self._node, offset, bytes(payload)[:written]))
        return written

    def truncate(self, size: int | None = None, /) -> int:
        size = super().truncate(size)
        self._log.add(Truncate(self._log.told("truncate", self._node), self._node, size))
        return size


class CallLog:
    """The calls that change what lies below `root`, which must now hold what `world` does; `world` follows them.

    `completed` has each checkpoint of which the program was told that it is complete: its generation, and how many
    calls there were by then.
    """

    def __init__(self, root: Path, world: World) -> None:
        self.world = world
        self.calls: list[Call] = []
        self.completed: list[tuple[int, int]] = []
        self._root = root
        self._nodes = {_identity(root.stat()): ROOT}
        self._nodes |= {_identity((root / path).stat()): node for path, node in world.now.walk()}
        self._open = io.open

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Take the log. Raises AssertionError where something was changed by a call that it does not know."""
        complete = Checkpoints.complete

        def completed(checkpoints: Checkpoints, generation: int, *listed: Any) -> None:
            complete(checkpoints, generation, *listed)
            self.completed.append((generation, len(self.calls)))

        with ExitStack() as patches:
            for module, name, changed in (
                (builtins, "open", self._opening),
                (io, "open", self._opening),
                (os, "mkdir", self._making(os.mkdir)),
                (os, "rmdir", self._removing("rmdir", os.rmdir)),
                (os, "unlink", self._removing("unlink", os.unlink)),
                (os, "remove", self._removing("unlink", os.remove)),
                (os, "rename", self._renaming(os.rename)),
                (os, "replace", self._renaming(os.replace)),
                (os, "fsync", self._syncing(os.fsync)),
                (os, "fdatasync", self._syncing(os.fdatasync)),
                (Checkpoints, "complete", completed),
            ):
                patches.enter_context(patch.object(module, name, changed))
            yield
        self._check()

    def add(self, call: Call) -> None:
        """Note a call that has just happened."""
        self.calls.append(call)
        self.world.apply(call)
        self._check()

    def told(self, verb: str, node: Node) -> str:
        """Put a call in words."""
        return f"{verb} {self.world.now.path(node) or '.'}"

    def place(self, path: PathLike, directory: int | None = None) -> tuple[Node, str] | None:
        """Find the directory below `root` that a path is in, and its name there; None for other paths."""
        split = Path(path)
        try:
            found = split.parent.stat() if directory is None else os.fstat(directory)
        except OSError:
            return None
        node = self._nodes.get(_identity(found))
        return None if node is None else (node, split.name)

    def opened(self, place: tuple[Node, str], status: os.stat_result, empties: bool) -> Node:
        """Note that a file was opened for writing, which makes or empties it."""
        parent, name = place
        node = self.world.now.entries[parent].get(name)
        if node is None:
            node = self._nodes[_identity(status)] = self.world.new(is_directory=False)
            self.add(Entries(f"create {self._joined(place)}", parent, {name: node}))
        elif empties:
            self.add(Truncate(self.told("truncate", node), node, 0))
        return node

    def _joined(self, place: tuple[Node, str]) -> str:
        return f"{self.world.now.path(place[0])}/{place[1]}".removeprefix("/")

    def _check(self) -> None:
        """Raise AssertionError unless the calls so far, replayed, give what is there."""
        there, replayed = tree_of(self._root), self.world.now.tree()
        wrong = [path for path in there.keys() | replayed.keys() if there.get(path, 0) != replayed.get(path, 0)]
        assert not wrong, f"changed by a call that is not in the log after {self.calls[-1:]}: {wrong}"

    def _lose(self, node: Node | None) -> None:
        """Forget which file or directory this was: the system may give its number to another."""
        self._nodes = {identity: known for identity, known in self._nodes.items() if known != node}

    def _opening(
        self, file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, *others: Any, **more: Any,
    ) -> IO[Any]:  # fmt: skip
        """Open as `open` does; what is opened for writing below `root` tells of its calls."""
        if isinstance(file, int) or not set(mode) & set("wax+") or self.place(file) is None:
            return self._open(file, mode, buffering, encoding, errors, newline, *others, **more)
        raw = RecordedFile(self, file, mode.replace("t", "").replace("b", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        def mkdir(path: PathLike, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            place = self.place(path, dir_fd)
            original(path, mode, dir_fd=dir_fd)
            if place is not None:
                node = self._nodes[_identity(os.stat(path, dir_fd=dir_fd))] = self.world.new(is_directory=True)
                self.add(Entries(f"mkdir {self._joined(place)}", place[0], {place[1]: node}))

        return mkdir

    def _removing(self, verb: str, original: Callable[..., None]) -> Callable[..., None]:
        def remove(path: PathLike, *, dir_fd: int | None = None) -> None:
            place = self.place(path, dir_fd)
            original(path, dir_fd=dir_fd)
            if place is not None:
                self._lose(self.world.now.entries[place[0]].get(place[1]))
                self.add(Entries(f"{verb} {self._joined(place)}", place[0], {place[1]: None}))

        return remove

    def _renaming(self, original: Callable[..., None]) -> Callable[..., None]:
        def rename(
            source: PathLike, target: PathLike, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            old, new = self.place(source, src_dir_fd), self.place(target, dst_dir_fd)
            original(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if old is None or new is None:
                return
            assert old[0] == new[0], f"{source} to {target}: what a failure leaves of this is not known"
            entries = self.world.now.entries[old[0]]
            self._lose(entries.get(new[1]))
            label = f"rename {self._joined(old)} to {new[1]}"
            self.add(Entries(label, old[0], {old[1]: None, new[1]: entries[old[1]]}))

        return rename

    def _syncing(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def sync(file: int) -> None:
            original(file)
            node = self._nodes.get(_identity(os.fstat(file)))
            if node is not None:
                self.add(Sync(self.told("fsync", node), node))

        return sync


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino
