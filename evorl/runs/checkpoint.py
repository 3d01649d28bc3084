"""The checkpoints of a run: directories that are created atomically by a rename and validated before use."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evorl.system.files import (
    digest,
    entry,
    entry_of,
    json_bytes,
    make_directory,
    read_bounded,
    reason,
    refuse_links,
    remove,
    sync_directory,
    write_through,
)
from evorl.system.formats import parse_json
from evorl.types import UserError

NUMBER = r"([0-9]{6}|[1-9][0-9]{6,11})"
FILE = re.compile(
    r"(agents|elite|(replay|environments|policy|learner|experience)-rank-[0-9]{3,6})\.safetensors|state\.json"
)
MANIFEST = "manifest.json"
AGENTS, ELITE, STATE = "agents.safetensors", "elite.safetensors", "state.json"
Files = Mapping[str, Mapping[str, Any]]
"""The manifest's entry (size and SHA-256) of each file, by file name."""


class Checkpoints:
    """The `generation-000012/` directories of a run, or others of one `stem` that are numbered in the same way.

    `manifest.json` in each lists the size and SHA-256 of every file, and a SHA-256 of itself.
    """

    def __init__(self, directory: Path, keep: int, stem: str = "generation") -> None:
        self.directory = directory
        self._keep = keep
        self._stem = stem
        self._name = re.compile(f"{stem}-{NUMBER}")

    def write(self, generation: int, name: str, payload: bytes) -> dict[str, Any]:
        """Write a file into the partial checkpoint and return its manifest entry. Raises OSError."""
        partial = self._gathering(generation)
        write_through(partial / name, payload)
        return entry(payload)

    def complete(self, generation: int, files: Files, best: int | None = None) -> None:
        """Turn the partial checkpoint into a complete one, and prune older checkpoints except `best`.

        Raises OSError; the existing checkpoints are then still there.
        """
        # The partial directory may not exist yet: a host whose replay is too large to be kept has written no file.
        partial, final = self._gathering(generation), self.path(generation)
        write_through(partial / MANIFEST, _manifest(generation, files))
        sync_directory(partial)
        if final.exists():
            self.set_aside(generation)
        partial.rename(final)
        sync_directory(self.directory)
        self.prune(best)

    def prune(self, best: int | None) -> None:
        """Remove all but the newest checkpoints and that of generation `best`. Raises OSError."""
        for old in self.generations()[: -self._keep]:
            if old != best:
                self._remove(old)

    def clear(self) -> None:
        """Remove all of them. Raises OSError."""
        for number in self.generations():
            self._remove(number)

    def _remove(self, generation: int) -> None:
        # Rename before removing, so that a kill in between cannot leave half a checkpoint.
        doomed = self.directory / f".partial-removed-{self._stem}-{generation:06d}"
        remove(doomed)
        self.path(generation).rename(doomed)
        remove(doomed)

    def discard(self) -> None:
        """Remove partial checkpoints left behind by an interruption."""
        for path in self.directory.glob(".partial-*"):
            remove(path)  # Links too: otherwise the next checkpoint would be written to the link's target.

    def set_aside(self, generation: int, why: str = "damaged") -> None:
        """Rename the checkpoint of `generation` and all newer ones to `WHY-generation-...`, without deleting them."""
        for number in self.generations():
            if number >= generation:
                aside = self.directory / f"{why}-{self.path(number).name}"
                remove(aside)
                self.path(number).rename(aside)

    def path(self, generation: int) -> Path:
        return self.directory / f"{self._stem}-{generation:06d}"

    def generations(self) -> list[int]:
        """Return the generations that have a checkpoint, oldest first. Raises UserError if they cannot be listed."""
        if not self.directory.is_dir():
            return []
        try:
            matches = [self._name.fullmatch(path.name) for path in self.directory.iterdir()]
        except OSError as error:
            raise UserError(f"{reason(error, self.directory)}: the checkpoints cannot be seen") from error
        return sorted(int(match[1]) for match in matches if match)

    def files(self, generation: int) -> Files:
        """Return the manifest's entries. Raises UserError if the manifest is damaged or lists an unknown file name."""
        path = self.path(generation) / MANIFEST
        refuse_links(self.directory, self.path(generation), path)
        try:
            payload = read_bounded(path)
            manifest = parse_json(payload)
            files: Files = {str(name): dict(listed) for name, listed in manifest["files"].items()}
            whole = payload == _manifest(generation, files)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged; it is not what was written") from error
        if not whole:
            raise UserError(f"{path}: damaged, or of another generation")
        for name in files:
            if not FILE.fullmatch(name):
                raise UserError(f"{path}: lists {name[:80]!r}, which no checkpoint has")
        return files

    def verify(self, generation: int) -> Files:
        """Check every file against the manifest and return its entries. Raises UserError naming a file that differs."""
        files = self.files(generation)
        for name, listed in files.items():
            path = self.path(generation) / name
            refuse_links(path)
            try:
                # Compare sizes first, so that a file that has grown without bounds is not read to its end.
                whole = path.stat().st_size == listed.get("size") and entry_of(path) == listed
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
            if not whole:
                raise UserError(f"{path}: damaged; size or SHA-256 differ from {MANIFEST}")
        return files

    def read(self, generation: int, name: str) -> bytes:
        """Return the contents of one file. Raises UserError if they differ from the manifest."""
        path = self.path(generation) / name
        listed = self.files(generation).get(name)
        if listed is None:
            raise UserError(f"{path}: {MANIFEST} does not list it")
        try:
            payload = read_bounded(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        if entry(payload) != listed:
            raise UserError(f"{path}: damaged; size or SHA-256 differ from {MANIFEST}")
        return payload

    def _gathering(self, generation: int) -> Path:
        """Create and return the directory of the partial checkpoint. Raises OSError, also if the run's was removed."""
        if not self.directory.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.directory.parent))
        partial = self.directory / f".partial-{self._stem}-{generation:06d}"
        make_directory(partial)
        return partial


def _manifest(generation: int, files: Files) -> bytes:
    """Return a manifest; its own digest tells damage to the manifest from damage to a file that it lists."""
    content = {"generation": generation, "files": files}
    return json_bytes(content | {"sha256": digest(json_bytes(content))})


def environments_file(rank: int) -> str:
    """Return the name of the file with the running episodes of the environments of `rank`."""
    return f"environments-rank-{rank:03d}.safetensors"


def part_file(name: str, rank: int) -> str:
    """Return the name of the file with one part of the training on `rank`, within a generation."""
    return f"{name}-rank-{rank:03d}.safetensors"


def replay_file(rank: int) -> str:
    """Return the name of the file with the replay buffer's part on `rank`."""
    return f"replay-rank-{rank:03d}.safetensors"
