"""The files of a run's checkpoints: directories that a rename makes valid, and a manifest of what each holds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evorl.system.files import (
    digest,
    entry,
    file_errors,
    json_bytes,
    make_subdirectory,
    read_bytes,
    refuse_links,
    remove,
    sync_directory,
    write_atomically,
)
from evorl.types.agents import Agent
from evorl.types.outcomes import UserError

NUMBER = r"([0-9]{6}|[1-9][0-9]{6,11})"
MANIFEST = "manifest.json"
AGENTS, ELITE = "agents.safetensors", "elite.safetensors"
ARCHIVE, STATE = "archive.safetensors", "state.json"
EXPERIENCE, ENVIRONMENTS = "experience", "environments"
INTERIM = "interim"
"""The stem of the names of checkpoints within a generation."""
PARTS = ("policy", "learner", EXPERIENCE)
"""The names of the parts, in the order of the argument `parts` of `Run.steps`."""
FILE = re.compile(
    "|".join(map(re.escape, (AGENTS, ELITE, ARCHIVE, STATE)))
    + rf"|({'|'.join((ENVIRONMENTS, *PARTS))})-rank-[0-9]{{3,6}}\.safetensors"
)
"""The name of a file of a checkpoint."""
Files = Mapping[str, Mapping[str, Any]]
"""The manifest's entry (size and SHA-256) of each file, by file name."""


class Checkpoints:
    """The `generation-000012/` directories of a run, or others of one `stem` that are numbered in the same way.

    `manifest.json` in each lists the size and SHA-256 of every file, and a SHA-256 of itself.
    """

    def __init__(self, directory: Path, stem: str = "generation") -> None:
        self.directory = directory
        self._stem = stem
        self._name = re.compile(f"{stem}-{NUMBER}")

    def write(self, number: int, name: str, payload: bytes) -> dict[str, Any]:
        """Write a file into the partial checkpoint and return its manifest entry. Raises OSError."""
        partial = self._gathering(number)
        write_atomically(partial / name, payload)
        return entry(payload)

    def complete(self, number: int, files: Files) -> None:
        """Turn the partial checkpoint into a complete one. Raises OSError."""
        # The partial directory may not exist yet: a host whose replay is too large to be kept has written no file.
        partial, final = self._gathering(number), self.path(number)
        write_atomically(partial / MANIFEST, _manifest(number, files))
        if final.exists():
            self.set_aside(number)
        partial.rename(final)
        sync_directory(self.directory)

    def prune(self, keep: int, best: int | None = None) -> None:
        """Remove all but the newest `keep` checkpoints and checkpoint `best`. Raises OSError."""
        for old in self.generations()[:-keep]:
            if old != best:
                self._remove(old)

    def clear(self) -> None:
        """Remove all checkpoints. Raises OSError."""
        for number in self.generations():
            self._remove(number)

    def _remove(self, number: int) -> None:
        # Rename before removing, so that a kill in between cannot leave half a checkpoint.
        doomed = self.directory / f".partial-removed-{self._stem}-{number:06d}"
        remove(doomed)
        self.path(number).rename(doomed)
        remove(doomed)

    def discard(self) -> None:
        """Remove partial checkpoints left behind by an interruption."""
        for path in self.directory.glob(".partial-*"):
            remove(path)  # Links too: otherwise the next checkpoint would be written to the link's target.

    def set_aside(self, number: int) -> None:
        """Rename checkpoint `number` and all newer ones to `damaged-...`, without deleting them."""
        for each in self.generations():
            if each >= number:
                aside = self.directory / f"damaged-{self.path(each).name}"
                remove(aside)
                self.path(each).rename(aside)

    def path(self, number: int) -> Path:
        return self.directory / f"{self._stem}-{number:06d}"

    def generations(self) -> list[int]:
        """The numbers of the checkpoints, oldest first. Raises UserError if they cannot be listed."""
        if not self.directory.is_dir():
            return []
        with file_errors(self.directory):
            matches = [self._name.fullmatch(path.name) for path in self.directory.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def files(self, number: int) -> Files:
        """The manifest's entries. Raises UserError if the manifest is damaged or lists an unknown file name."""
        path = self.path(number) / MANIFEST
        refuse_links(self.directory, self.path(number))
        try:
            with file_errors(path):
                payload = read_bytes(path)
            files: Files = {str(name): dict(listed) for name, listed in json.loads(payload)["files"].items()}
            is_whole = payload == _manifest(number, files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: damaged; it is not what was written") from error
        if not is_whole:
            raise UserError(f"{path}: damaged, or of another generation")
        for name in files:
            if not FILE.fullmatch(name):
                raise UserError(f"{path}: lists {name[:80]!r}, which no checkpoint has")
        return files

    def verify(self, number: int) -> Files:
        """Check every file against the manifest and return its entries. Raises UserError naming a file that differs."""
        files = self.files(number)
        for name in files:
            self._read(number, name, files)
        return files

    def read(self, number: int, name: str) -> bytes:
        """The contents of one file. Raises UserError if they differ from the manifest."""
        return self._read(number, name, self.files(number))

    def agents(self, number: int, name: str) -> list[Agent]:
        """The agents in one file. Raises UserError like `read`, and if it is no file of agents."""
        from evorl.system.formats import decode_agents

        return decode_agents(self.read(number, name), str(self.path(number) / name))

    def _read(self, number: int, name: str, files: Files) -> bytes:
        path = self.path(number) / name
        if name not in files:
            raise UserError(f"{path}: {MANIFEST} does not list it")
        with file_errors(path):
            payload = read_bytes(path)
        if entry(payload) != files[name]:
            raise UserError(f"{path}: damaged; size or SHA-256 differ from {MANIFEST}")
        return payload

    def _gathering(self, number: int) -> Path:
        """Create and return the directory of the partial checkpoint. Raises OSError, also if the run's was removed."""
        partial = self.directory / f".partial-{self._stem}-{number:06d}"
        make_subdirectory(self.directory)
        make_subdirectory(partial)
        return partial


def _manifest(number: int, files: Files) -> bytes:
    """A manifest; its own digest tells damage to the manifest from damage to a file that it lists."""
    content = {"generation": number, "files": files}
    return json_bytes(content | {"sha256": digest(json_bytes(content))})


def part_file(name: str, rank: int) -> str:
    """The name of the file with what `rank` alone has: the part `name` of its training, or its environments."""
    return f"{name}-rank-{rank:03d}.safetensors"
