"""Saving a checkpoint after each generation: every rank writes its files and reloads the agents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from evorl.algorithms import Experience
from evorl.config import AnyConfig
from evorl.distributed import Placement, Ranks
from evorl.envs.recovery import Continued
from evorl.runs.checkpoint import AGENTS, ELITE, STATE, Checkpoints, Files, environments_file, replay_file
from evorl.runs.host_directory import HostDirectory
from evorl.runs.progress import Progress
from evorl.system.console import WarnOnce
from evorl.system.files import digest, json_bytes, read_bounded, reason
from evorl.system.formats import decode_agents, encode_tensors
from evorl.types import Agent, Tensors


class CheckpointManager:
    """Writes the checkpoints of a run, collectively on all ranks.

    Ranks that can access the main process's directory write into it. Every other host keeps the replay parts of its
    ranks in a directory of its own.
    """

    def __init__(
        self,
        config: AnyConfig,
        placement: Placement,
        experience: Experience,
        environments: Continued | None,
        host: HostDirectory,
        warn_once: WarnOnce,
    ) -> None:
        """`environments` are those whose episodes continue into the next generation, or None."""
        self._config = config
        self._placement = placement
        self._ranks = placement.ranks
        self._experience = experience
        self._environments = environments
        self._writer = CheckpointWriter(host, placement.ranks)
        self._checkpoints = host.directory.checkpoints
        self._warn_once = warn_once

    def save(self, progress: Progress, agents: bytes, elite: bytes) -> str:
        """Write a checkpoint from every rank's files. If a disk fails, warn and let training continue.

        `agents` and `elite` are encoded agents, on the main process. Returns the problem, empty on success: the same on
        all ranks, unless only a host other than the main process's failed.
        """
        generation = progress.generation
        progress.note_setup(self._config, self._placement)
        files = self._files(progress, agents, elite)
        problem = self._writer.write(self._checkpoints, generation, files, progress.elite.generation)
        if problem:
            lost = f"generation {generation} has no checkpoint: {problem}; training goes on, but what comes now is lost"
            self._warn_once("checkpoint", f"{lost} if the run ends before a later one succeeds")
        else:
            self._warn_once.reset("checkpoint")
        return problem

    def reload(self, payload: bytes, generation: int) -> list[Agent]:
        """Return the main process's agents on all ranks, from the checkpoint where accessible, else by broadcast."""
        ranks, path = self._ranks, self._checkpoints.path(generation) / AGENTS
        expected = ranks.broadcast_bytes(digest(payload).encode(), "the evolved agents' digest").decode()
        if not ranks.is_main and path.is_file():
            payload = read_bounded(path)
        seen = ranks.gather(np.array([float(digest(payload) == expected)]), "who can see the checkpoint")
        if not seen.all():
            payload = ranks.broadcast_bytes(payload, "the evolved agents")
        return decode_agents(payload, str(path))

    def _files(self, progress: Progress, agents: bytes, elite: bytes) -> dict[str, bytes]:
        """Return this rank's files: its replay and running episodes; on the main process also agents, state, elite."""
        rows, numbers = self._experience.state()
        progress.replay = self._replay_is_kept(bytes_of(rows))
        files = {replay_file(self._ranks.rank): encode_tensors(rows, numbers)} if progress.replay else {}
        if self._environments is not None and (episodes := self._environments.state()):
            files[environments_file(self._ranks.rank)] = encode_tensors(episodes, {})
        if self._ranks.is_main:
            files |= {AGENTS: agents, STATE: json_bytes(asdict(progress))} | ({ELITE: elite} if elite else {})
        return files

    def _replay_is_kept(self, size: int) -> bool:
        """Return True if the replay parts of all ranks, this one being `size` bytes, total within the limit."""
        total = float(self._ranks.gather(np.array([float(size)]), "the sizes of the replay").sum()) / 1e6
        limit = self._config.checkpoint.max_replay_mb
        if total > limit:
            what = f"the replay takes {total:.0f} MB, more than checkpoint.max_replay_mb {limit:g}, and is not kept"
            self._warn_once("replay", f"{what}; a resumed run will not be bit-exact")
        return total <= limit


class CheckpointWriter:
    """Writes a checkpoint from the files of every rank, collectively, first in the main process's directory."""

    def __init__(self, host: HostDirectory, ranks: Ranks) -> None:
        self._host = host
        self._ranks = ranks
        self._directory = host.directory

    def write(self, checkpoints: Checkpoints, number: int, files: Mapping[str, bytes], best: int | None = None) -> str:
        """Write checkpoint `number` with these files of this rank; older ones are pruned, except for `best`.

        Returns the problem, empty on success. One on the main process is the same on all ranks; another host that fails
        alone has no such checkpoint.
        """
        problem = self._complete(checkpoints, number, self._gathered(checkpoints, number, files), best)
        if problem:
            checkpoints.discard()
        return problem

    def _gathered(self, checkpoints: Checkpoints, number: int, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
        """Write this rank's files; return the manifest entries and the problem, if any, of every rank.

        The generation's lines are flushed first: a checkpoint guarantees that they are on disk.
        """
        mine: dict[str, Any] = {"files": {}, "problem": ""}
        try:
            self._directory.flush()
            mine["files"] = {name: checkpoints.write(number, name, value) for name, value in files.items()}
        except OSError as error:
            mine["problem"] = reason(error, self._directory.path)
        parts = self._ranks.gather_bytes(json_bytes(mine), "the other ranks' checkpoint files")
        return [json.loads(part) for part in parts]

    def _complete(
        self, checkpoints: Checkpoints, number: int, parts: Sequence[dict[str, Any]], best: int | None
    ) -> str:
        """Complete the checkpoint, first in the main process's directory, then on the other hosts.

        Returns the problem.
        """
        ranks, files = self._ranks, [part["files"] for part in parts]
        problem = next((part["problem"] for part in parts if part["problem"]), "")

        def complete(own: Sequence[Files]) -> str:
            try:
                checkpoints.complete(number, {name: listed for part in own for name, listed in part.items()}, best)
            except OSError as error:
                return reason(error, self._directory.path)
            return ""

        if not problem and ranks.is_main:
            problem = complete([part for part, shares in zip(files, self._host.who_shares, strict=True) if shares])
        problem = ranks.broadcast_bytes(problem.encode(), "the checkpoint").decode()
        if not problem and self._host.leads and not ranks.is_main:
            problem = complete(files[ranks.rank :][: ranks.on_host])
        return problem


def bytes_of(tensors: Tensors) -> int:
    """Return the size of all tensors in bytes."""
    return sum(value.nbytes for value in tensors.values())
