"""Files that are whole or not there. Nothing here pickles or unpickles."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from evorl.types import ROLES, Agent, Roles, Tensors, UserError

CHECKPOINT = re.compile(r"generation-(\d{6,})")


def write_atomically(path: Path, payload: bytes) -> None:
    """Write so that the file is seen whole or not at all, also after a crash."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file that a person can read."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def sync_directory(path: Path) -> None:
    """Make renames inside a directory last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def encode_agents(agents: Sequence[Agent]) -> bytes:
    """Agents as safetensors, with their descriptions in its header; `decode_agents` reads it back."""
    tensors = {
        f"{index}/{module}/{role}/{name}": value.contiguous()
        for index, agent in enumerate(agents)
        for module, roles in agent.tensors.items()
        for role, named in roles.items()
        for name, value in named.items()
    }
    descriptions = json.dumps([agent.describe() for agent in agents])
    return save(tensors, metadata={"agents": descriptions})


def decode_agents(payload: bytes, where: str) -> list[Agent]:
    """The agents in `payload`; errors say `where` it came from. Raises UserError."""
    try:
        header_size = int.from_bytes(payload[:8], "little")
        descriptions = json.loads(json.loads(payload[8 : 8 + header_size])["__metadata__"]["agents"])
        tensors: list[dict[str, Roles]] = [{} for _ in descriptions]
        for key, value in load(payload).items():
            index, module, role, name = key.split("/", 3)
            tensors[int(index)].setdefault(module, {}).setdefault(role, {})[name] = value
        for roles in (roles for agent in tensors for roles in agent.values()):
            for role in ROLES:
                roles.setdefault(role, {})
        return [Agent.from_description(*pair) for pair in zip(descriptions, tensors, strict=True)]
    except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{where}: not a file of agents: {error}") from error


def encode_tensors(tensors: Tensors, numbers: Mapping[str, int]) -> bytes:
    """Tensors as safetensors, with numbers in its header; `decode_tensors` reads it back."""
    return save(
        {name: value.contiguous() for name, value in tensors.items()}, metadata={"numbers": json.dumps(dict(numbers))}
    )


def decode_tensors(payload: bytes) -> tuple[Tensors, dict[str, int]]:
    header_size = int.from_bytes(payload[:8], "little")
    numbers = json.loads(json.loads(payload[8 : 8 + header_size])["__metadata__"]["numbers"])
    return load(payload), numbers


class Checkpoints:
    """The checkpoints of a run: `generation-000012/` directories that appear by a rename, whole.

    `manifest.json` lists every file's size and SHA-256.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = keep

    def partial(self, generation: int) -> Path:
        """Where the files of a checkpoint are gathered before it is one."""
        path = self.directory / f".partial-{generation:06d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def complete(self, generation: int, files: Mapping[str, Mapping[str, Any]]) -> Path:
        """Make a checkpoint of the gathered files, whose sizes and digests are `files`; drop the oldest ones."""
        partial, final = self.partial(generation), self.path(generation)
        write_json(partial / "manifest.json", {"generation": generation, "files": files})
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync_directory(self.directory)
        for old in self.generations()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def path(self, generation: int) -> Path:
        return self.directory / f"generation-{generation:06d}"

    def generations(self) -> list[int]:
        """The generations there are checkpoints of, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = (CHECKPOINT.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def read(self, generation: int, name: str) -> bytes:
        """One file, checked against the manifest. Raises UserError where they do not agree."""
        path = self.path(generation) / name
        try:
            manifest = json.loads((self.path(generation) / "manifest.json").read_bytes())
            listed = manifest["files"][name]
            payload = path.read_bytes()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: cannot be read, or manifest.json does not list it: {error}") from error
        if manifest["generation"] != generation or listed != entry(payload):
            raise UserError(f"{path}: damaged; size or SHA-256 differ from manifest.json")
        return payload

    def files(self, generation: int) -> list[str]:
        """The names of a checkpoint's files."""
        try:
            return list(json.loads((self.path(generation) / "manifest.json").read_bytes())["files"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{self.path(generation)}: has no readable manifest.json: {error}") from error


def entry(payload: bytes) -> dict[str, Any]:
    """What a manifest says about a file."""
    return {"size": len(payload), "sha256": digest(payload)}
