"""The checkpoints of a run: directories that appear by a rename, whole, and are validated before use."""

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
from evorl.system.json_text import parse_json
from evorl.types import UserError

CHECKPOINT = re.compile(r"generation-([0-9]{6}|[1-9][0-9]{6,11})")
FILE = re.compile(r"(agents|elite|(replay|environments)-rank-[0-9]{3,6})\.safetensors|state\.json")
MANIFEST = "manifest.json"
AGENTS, ELITE, STATE = "agents.safetensors", "elite.safetensors", "state.json"
Files = Mapping[str, Mapping[str, Any]]
"""A manifest's entry for each file, by its name."""


class Checkpoints:
    """`generation-000012/` directories. `manifest.json` in each has every file's size and SHA-256, and its own."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = keep

    def write(self, generation: int, name: str, payload: bytes) -> dict[str, Any]:
        """Put a file where the checkpoint is being gathered; gives its entry in the manifest. Raises OSError."""
        partial = self._gathering(generation)
        write_through(partial / name, payload)
        return entry(payload)

    def complete(self, generation: int, files: Files, best: int | None = None) -> None:
        """Make a checkpoint of the gathered files and prune the older ones.

        Raises OSError; the checkpoints there were are then still there.
        """
        # A host whose replay is too large to be kept has no file.
        partial, final = self._gathering(generation), self.path(generation)
        write_through(partial / MANIFEST, _manifest(generation, files))
        sync_directory(partial)
        if final.exists():
            self.set_aside(generation)
        partial.rename(final)
        sync_directory(self.directory)
        self.prune(best)

    def prune(self, best: int | None) -> None:
        """Remove all checkpoints but the newest ones and that of `best`. Raises OSError."""
        for old in self.generations()[: -self._keep]:
            if old != best:
                # Removed under another name, since a kill on the way must leave no half of a checkpoint.
                doomed = self.directory / f".partial-removed-{old:06d}"
                remove(doomed)
                self.path(old).rename(doomed)
                remove(doomed)

    def discard(self) -> None:
        """Remove what checkpoints that were never completed have left behind."""
        for path in self.directory.glob(".partial-*"):
            remove(path)  # A link too: else the next checkpoint would be gathered where it leads.

    def set_aside(self, generation: int, why: str = "damaged") -> None:
        """Take a checkpoint that is not gone on from, and the newer ones, out of the way, without losing them."""
        for number in self.generations():
            if number >= generation:
                aside = self.directory / f"{why}-{self.path(number).name}"
                remove(aside)
                self.path(number).rename(aside)

    def path(self, generation: int) -> Path:
        return self.directory / f"generation-{generation:06d}"

    def generations(self) -> list[int]:
        """Return the generations there are checkpoints of, oldest first."""
        if not self.directory.is_dir():
            return []
        try:
            matches = [CHECKPOINT.fullmatch(path.name) for path in self.directory.iterdir()]
        except OSError as error:
            raise UserError(f"{reason(error, self.directory)}: the checkpoints cannot be seen") from error
        return sorted(int(match[1]) for match in matches if match)

    def files(self, generation: int) -> Files:
        """Return what the manifest lists. Raises UserError where it is not the one that was written."""
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
        """Return what the manifest lists, once every file agrees with it. Raises UserError naming one that does not."""
        files = self.files(generation)
        for name, listed in files.items():
            path = self.path(generation) / name
            refuse_links(path)
            try:
                # The size first, so that a file that has grown without bounds is not read to its end.
                whole = path.stat().st_size == listed.get("size") and entry_of(path) == listed
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
            if not whole:
                raise UserError(f"{path}: damaged; size or SHA-256 differ from {MANIFEST}")
        return files

    def read(self, generation: int, name: str) -> bytes:
        """Return one file, checked against the manifest. Raises UserError where they do not agree."""
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
        """Return the directory where a checkpoint is gathered. Raises OSError, also where the run's was removed."""
        if not self.directory.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.directory.parent))
        partial = self.directory / f".partial-{generation:06d}"
        make_directory(partial)
        return partial


def _manifest(generation: int, files: Files) -> bytes:
    """Return a manifest; by its own digest, damage to it is not taken for damage to a file that it lists."""
    content = {"generation": generation, "files": files}
    return json_bytes(content | {"sha256": digest(json_bytes(content))})


def environments_file(rank: int) -> str:
    """Return the name of the file with the running episodes of a rank's environments."""
    return f"environments-rank-{rank:03d}.safetensors"


def replay_file(rank: int) -> str:
    """Return the name of the file with a rank's part of the replay."""
    return f"replay-rank-{rank:03d}.safetensors"
