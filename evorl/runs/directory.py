"""The directory of a run: ownership and locking, the files written, and the checks before a resume."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evorl.algorithms import SETTINGS
from evorl.config import AnyConfig, read_yaml, validate, without_removed
from evorl.distributed import Launch
from evorl.runs.checkpoint import Checkpoints
from evorl.runs.config_file import read_config
from evorl.runs.history import JsonLines
from evorl.system.files import (
    Lock,
    make_directory,
    read_bounded,
    read_owner,
    reason,
    refuse_links,
    refuse_links_within,
    remove,
    settle,
    write_atomically,
    write_json,
)
from evorl.system.formats import decode_agents
from evorl.types import Agent, UserError

INTERFACE = "environment.json"
"""The file that describes the observation and action spaces."""
FREE_TO_CHANGE = (
    "run.",
    "training.",
    "tracking.",
    "checkpoint.",
    "population.placement",
    "environment.max_restarts",
    "environment.vectorization",
    "network.bf16",
)
"""Settings, or prefixes of settings, that may change on resume."""
LOCK_PATIENCE = 10.0
"""Seconds to wait for another process that still uses a run's directory."""


@dataclass(frozen=True)
class Owner:
    """The process, within a launch, that uses a run's directory."""

    host: str
    pid: int
    launch: Launch

    @classmethod
    def here(cls, launch: Launch) -> Owner:
        """Return this process as an owner."""
        return cls(socket.gethostname(), os.getpid(), launch)

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "pid": self.pid, "launch": self.launch.name}

    def had(self, directory: Path) -> bool:
        """Return True if an earlier attempt of the same, restarted launch used the directory."""
        return self.launch.restarted and read_owner(directory).get("launch") == self.launch.name


class RunDirectory:
    """The directory `runs/NAME/`; the README lists its files. Only the main process writes outside `checkpoints/`."""

    def __init__(self, path: Path, keep: int, lock: Lock | None = None) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self.interim = Checkpoints(path / "checkpoints", keep=1, stem="interim")
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.lineage = JsonLines(path / "lineage.jsonl")
        self._lock = lock

    @classmethod
    def claim(cls, config: AnyConfig, owner: Owner) -> RunDirectory:
        """Claim the run's directory and lock it until the run ends. Raises UserError if it belongs to another run."""
        path = config.run.directory
        try:
            path = _directory(config, owner)
            make_directory(path)
            lock = Lock(path, LOCK_PATIENCE)
        except OSError as error:
            raise UserError(f"run.directory: cannot write to {reason(error, path)}") from error
        run = cls(path, config.checkpoint.keep, lock)
        try:
            settle(path.parent.parent, path.parent, path, run.checkpoints.directory)
            run._take_over(config, owner.had(path))
            # Sign last: a launcher's next attempt must not take over a directory that refused this one.
            lock.sign(owner.to_json())
        except OSError as error:
            run.release()
            raise UserError(f"run.directory: cannot write to {reason(error, path)}") from error
        except UserError:
            run.release()
            raise
        return run

    def release(self) -> None:
        """Release the lock on the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take_over(self, config: AnyConfig, restarted: bool) -> None:
        refuse_links_within(self.path)
        there = {path.name for path in self.path.iterdir()} - {".lock"}
        if there and "config.yaml" in there:
            if config.run.resume == "never" and not restarted:
                raise UserError(
                    f"run.name: {self.path} already holds a run; choose another name, or go on with run.resume=auto"
                )
            check_same_run(self.path, config)
        elif any(not name.startswith(".") for name in there):
            raise UserError(f"run.name: {self.path} is not empty and holds no run; choose another name")
        write_atomically(self.path / "config.yaml", config.to_yaml().encode())
        (self.path / "summary.json").unlink(missing_ok=True)
        self.checkpoints.discard()

    def flush(self) -> None:
        """Write pending lines of metrics and lineage to disk. Raises OSError."""
        self.metrics.flush()
        self.lineage.flush()

    def cut_back(self, generation: int, elite: bytes) -> None:
        """Roll metrics, lineage and elite back to the end of `generation`; `elite` is empty if there was none."""
        self.metrics.cut_back(generation)
        self.lineage.cut_back(generation)
        if elite:
            self.write_elite(elite)
        else:
            remove(self.path / "elite")

    def write_elite(self, payload: bytes) -> None:
        """Write the best agent so far, encoded as a file of one agent, to `elite/`."""
        directory = self.path / "elite"
        refuse_links(directory)
        make_directory(directory)
        agent = decode_agents(payload, str(directory))[0]
        write_atomically(directory / "agent.safetensors", payload)
        write_json(directory / "agent.json", agent.describe())

    def write_interface(self, interface: Mapping[str, Any]) -> None:
        """Write the description of the spaces, for use of an agent without its environment. Raises OSError."""
        write_json(self.path / INTERFACE, interface)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, which says how the run ended."""
        write_json(self.path / "summary.json", summary)


def load_elite(path: Path) -> tuple[dict[str, Any], Agent]:
    """Return the configuration and the elite of the run in directory `path`. Raises UserError if it has none yet."""
    config = read_config(path)
    file = path / "elite" / "agent.safetensors"
    try:
        if not file.is_file():
            raise UserError(f"{path}: the run has no elite yet; its first generation has not ended")
    except OSError as error:
        raise UserError(reason(error, file)) from error
    agents = decode_agents(read_bounded(file), str(file))
    if len(agents) != 1:
        raise UserError(f"{file}: holds {len(agents)} agents; an elite is one")
    return config, agents[0]


def check_same_run(path: Path, config: AnyConfig) -> None:
    """Raise UserError if `config` differs from that of the run in `path` in a setting that may not change on resume."""
    begun = validate(without_removed(read_yaml(path / "config.yaml")), SETTINGS)
    if difference := _first_difference(begun, config):
        raise UserError(f"run.resume: {path} was begun with another configuration: {difference}")


def _directory(config: AnyConfig, owner: Owner) -> Path:
    """Return the run's directory: by name, else that of an earlier attempt of this launch, else a new one."""
    directory, name = config.run.directory, config.run.name
    if name:
        return directory / name
    if config.run.resume == "auto":
        raise UserError("run.name: resuming needs the name of the run to resume")
    earlier = [path for path in directory.glob("*") if owner.had(path)] if owner.launch.restarted else []
    if earlier:
        return max(earlier, key=lambda path: (path / ".lock").stat().st_mtime)
    environment = config.environment.id.split(":")[-1].replace("/", "-")
    stem = f"{config.algorithm.name}-{environment}-{time.strftime('%Y%m%d-%H%M%S')}"
    make_directory(directory)
    for number in itertools.count(1):
        path = directory / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            make_directory(path, fresh=True)
            return path
    raise AssertionError("itertools.count ended")


def _first_difference(old: AnyConfig, new: AnyConfig) -> str | None:
    """Return the first difference in a setting that may not change on resume, or None."""
    before, after = (_leaves(config.model_dump(mode="json")) for config in (old, new))
    for key in sorted(before.keys() | after.keys()):
        if (key in new.algorithm.frozen_on_resume or not key.startswith(FREE_TO_CHANGE)) and before.get(
            key
        ) != after.get(key):
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
