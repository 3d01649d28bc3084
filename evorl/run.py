"""The directory of a run: what is written, in which order, and how it is taken up again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evorl.checkpoint import Checkpoints, decode_agents, encode_agents, write_atomically, write_json
from evorl.config import AnyConfig, read_yaml
from evorl.types import Agent, EvorlWarning, UserError

FREE_TO_CHANGE = ("run", "training", "tracking", "checkpoint")
"""Sections in which a resumed run may differ from its first part."""


class RunDirectory:
    """`runs/NAME/` on the main process; see the README for its files."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", keep)

    @classmethod
    def claim(cls, config: AnyConfig) -> tuple[RunDirectory, int | None]:
        """The directory for this run, and the generation to resume from if there is one.

        Raises UserError where it belongs to another run.
        """
        directory = config.run.directory
        if config.run.name is None and config.run.resume == "auto":
            raise UserError("run.name: resuming needs the name of the run to resume")
        try:
            path = directory / config.run.name if config.run.name else _fresh(directory, config)
            run = cls(path, config.checkpoint.keep)
            generation = run._resumable(config)
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "config.yaml", config.to_yaml().encode())
            run.cut_back(generation or 0)
        except OSError as error:
            raise UserError(f"run.directory: cannot write to {error.filename}: {error.strerror}") from error
        return run, generation

    def _resumable(self, config: AnyConfig) -> int | None:
        if not self.path.exists() or not any(self.path.iterdir()):
            return None
        if config.run.resume == "never":
            raise UserError(
                f"run.name: {self.path} already holds a run; choose another name, or go on with run.resume=auto"
            )
        if not (self.path / "config.yaml").is_file():
            raise UserError(f"run.name: {self.path} is not empty and holds no run; choose another name")
        difference = _first_difference(read_yaml(self.path / "config.yaml"), yaml.safe_load(config.to_yaml()))
        if difference:
            raise UserError(f"run.resume: {self.path} was begun with another configuration: {difference}")
        for generation in reversed(self.checkpoints.generations()):
            try:
                for name in self.checkpoints.files(generation):
                    self.checkpoints.read(generation, name)
                return generation
            except UserError as error:
                warnings.warn(f"{error}; going on from the checkpoint before it", EvorlWarning, stacklevel=2)
        return None

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to a `.jsonl` file."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())  # The checkpoint that follows must not outlast these lines.

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of a `.jsonl` file."""
        path = self.path / name
        return [json.loads(line) for line in _whole_lines(path)] if path.is_file() else []

    def cut_back(self, generation: int) -> None:
        """Drop the lines of generations after `generation`, which are about to be lived again."""
        for path in (self.path / "metrics.jsonl", self.path / "lineage.jsonl"):
            if path.is_file():
                kept = [line for line in _whole_lines(path) if json.loads(line)["generation"] <= generation]
                write_atomically(path, "".join(kept).encode())

    def write_elite(self, agent: Agent) -> None:
        """Keep the best agent so far."""
        (self.path / "elite").mkdir(exist_ok=True)
        write_atomically(self.path / "elite" / "agent.safetensors", encode_agents([agent]))
        write_json(self.path / "elite" / "agent.json", agent.describe())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """How the run ended."""
        write_json(self.path / "summary.json", summary)


def load_elite(path: Path) -> tuple[dict[str, Any], Agent]:
    """The configuration and the best agent of the run in directory `path`. Raises UserError."""
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path}: there is no run here (no config.yaml)")
    file = path / "elite" / "agent.safetensors"
    if not file.is_file():
        raise UserError(f"{path}: the run has no elite yet; its first generation has not ended")
    return read_yaml(path / "config.yaml"), decode_agents(file.read_bytes(), str(file))[0]


def _fresh(directory: Path, config: AnyConfig) -> Path:
    stem = f"{config.algorithm.name}-{config.environment.id.split(':')[-1]}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = directory / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("itertools.count ended")


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that a crash cut short."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first setting, outside the sections that may change, in which two configurations differ."""
    before, after = _leaves(old), _leaves(new)
    for key in sorted(before.keys() | after.keys()):
        if key.split(".")[0] not in FREE_TO_CHANGE and before.get(key) != after.get(key):
            return f"{key} was {before.get(key)} and is now {after.get(key)}"
    return None


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
