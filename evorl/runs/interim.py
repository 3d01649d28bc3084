"""Interim checkpoints: a generation in progress, saved between two of its steps and resumed there.

An interim checkpoint is a directory `checkpoints/interim-000003/`, numbered in the order of saving. It has what the
generation has changed since its beginning, in files of every rank; the agents with which the generation began are those
of the checkpoint before it, or the initial ones. It is removed with the checkpoint that follows.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Protocol

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evorl.config import AnyConfig
from evorl.config.errors import on_one_line
from evorl.distributed import Placement
from evorl.envs.recovery import Continued
from evorl.runs.checkpoint import STATE, environments_file, part_file
from evorl.runs.checkpoint_manager import CheckpointWriter, bytes_of
from evorl.runs.elite import Number
from evorl.runs.host_directory import HostDirectory
from evorl.runs.progress import Progress, progress_of
from evorl.seeding import derive_seed
from evorl.system.console import WarnOnce
from evorl.system.files import digest, json_bytes
from evorl.system.formats import decode_tensors, encode_agents, encode_tensors, parse_json
from evorl.types import Agent, Tensors, UserError, Words

PARTS = ("policy", "learner", "experience")
"""The names of the parts, in the order in which `Run.steps` is given them."""
RETRY = 60.0
"""Seconds from an interim checkpoint that could not be saved to the next attempt."""


class Part(Protocol):
    """A part of the training that changes from step to step."""

    def snapshot(self) -> tuple[Tensors, dict[str, int]]:
        """Return what the generation has changed so far, on this rank."""

    def resume(self, tensors: Tensors, numbers: dict[str, int]) -> None:
        """Load the output of `snapshot` at the beginning of the same generation. Raises UserError."""


Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Position:
    """How far a generation is: the vector steps that each rank has done, of `horizon`, and the seconds they took.

    `base` is the digest of the agents with which it began.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    base: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    steps: Annotated[list[Number], Field(min_length=1, max_length=1_000_000)]
    horizon: Number
    training_seconds: Seconds = 0.0
    seconds: Annotated[dict[Words, Seconds], Field(max_length=100)] = field(default_factory=dict)


POSITION = TypeAdapter(Position)


class InterimCheckpoints:
    """Saves and finds interim checkpoints, collectively on all ranks.

    `position` and `progress` are those of the interim checkpoint that `find` has found, until it is resumed.
    """

    def __init__(
        self,
        config: AnyConfig,
        placement: Placement,
        environments: Continued,
        host: HostDirectory,
        warn_once: WarnOnce,
    ) -> None:
        self.position: Position | None = None
        self.progress: Progress | None = None
        self._config = config
        self._placement = placement
        self._ranks = placement.ranks
        self._environments = environments
        self._host = host
        self._checkpoints = host.directory.interim
        self._writer = CheckpointWriter(host, placement.ranks)
        self._warn_once = warn_once
        self._number = 0
        minutes = config.checkpoint.minutes
        self._interval = None if minutes is None else 60 * minutes
        self._due = time.monotonic()
        self.restart_clock()

    @property
    def is_due(self) -> bool:
        """Return whether it is time to save again; only the main process keeps the time."""
        return self._interval is not None and self._ranks.is_main and time.monotonic() >= self._due

    def restart_clock(self) -> None:
        """Wait `checkpoint.minutes` before the next one is due."""
        self._due = time.monotonic() + (self._interval or 0.0)

    def postpone(self) -> None:
        """Wait a little before the next one is due, because a rank was not within the generation."""
        self._due = time.monotonic() + min(1.0, self._interval or 1.0)

    def find(self, generation: int, agents: Sequence[Agent]) -> bool:
        """Return whether there is one of the generation after `generation`, which begins with `agents`.

        Then the episodes that were running in it go on. One that is damaged, or whose episodes cannot go on, is set
        aside under another name.
        """
        if self._config.actors is not None:
            return False
        ranks, checkpoints = self._ranks, self._checkpoints
        newest = ranks.from_main(lambda: str(max(checkpoints.generations(), default=0)).encode(), "interim checkpoints")
        self._number = int(newest)
        if not self._number:
            return False
        if problem := self._first(self._damage()):
            return self._refuse(problem, f"generation {generation + 1} begins anew")
        position, progress = self._read(ranks.from_main(lambda: checkpoints.read(self._number, STATE), "its state"))
        if progress.generation < generation:
            self.clear()
            return False
        if progress.generation > generation or position.base != digest(encode_agents(agents)):
            return self._refuse(
                f"{checkpoints.path(self._number)}: is of a generation that began otherwise",
                f"generation {generation + 1} begins anew",
            )
        where = f"{checkpoints.path(self._number)}: generation {generation + 1} begins anew"
        if progress.moved(self._config, self._placement):
            if ranks.is_main:
                here = f"{progress.placement} on {progress.ranks} ranks with {progress.vectorization} environments"
                self._warn_once("interim", f"{where}: it was {here} within it, and can go on only so")
            return False
        if lost := self._first(self._restore_environments(generation + 1)):
            return self._refuse(lost, f"generation {generation + 1} begins anew")
        self.position, self.progress = position, progress
        return True

    def resume(self, parts: Sequence[Part]) -> int:
        """Load the one that was found into the parts; return this rank's steps in it. Raises UserError on all ranks."""
        assert self.position is not None
        problem, rank = "", self._ranks.rank
        for name, part in zip(PARTS, parts, strict=True):
            file = part_file(name, rank)
            try:
                part.resume(*decode_tensors(self._checkpoints.read(self._number, file), file))
            except UserError as error:
                problem = problem or (
                    f"{self._checkpoints.path(self._number) / file}: {error}; without {self._checkpoints.path(0).stem} "
                    "directories its generation begins anew"
                )
        self._ranks.raise_if_any_failed(problem, "the interim checkpoint")
        steps = self.position.steps[rank]
        self.position = None
        return steps

    def save(
        self,
        progress: Progress,
        agents: Sequence[Agent],
        parts: Sequence[Part],
        done: int,
        horizon: int,
        training_seconds: float,
        seconds: Mapping[str, float],
    ) -> str:
        """Save a generation that began with `agents`, after `done` of `horizon` steps on this rank.

        Returns the problem, empty on success.
        """
        ranks, rank = self._ranks, self._ranks.rank
        self._number += 1
        self.restart_clock()
        if not self._environments.can_continue:
            return "episodes of these environments cannot go on in another process"
        snapshots = {name: part.snapshot() for name, part in zip(PARTS, parts, strict=True)}
        mine = {"steps": done, "bytes": bytes_of(snapshots["experience"][0]), "problem": ""}
        try:
            episodes = self._environments.state()
        except Exception as error:  # Environments may raise anything, and a signal may have ended their processes.
            mine["problem"] = f"the environments do not tell their state: {on_one_line(repr(error), 200)}"
        everyones = [json.loads(each) for each in ranks.gather_bytes(json_bytes(mine), "the other ranks' steps")]
        if problem := next((each["problem"] for each in everyones if each["problem"]), ""):
            return str(problem)
        total, limit = sum(each["bytes"] for each in everyones) / 1e6, self._config.checkpoint.max_replay_mb
        if total > limit:
            return f"the experience takes {total:.0f} MB, more than checkpoint.max_replay_mb {limit:g}"
        files = {part_file(name, rank): encode_tensors(*snapshot) for name, snapshot in snapshots.items()}
        files[environments_file(rank)] = encode_tensors(episodes, {})
        if ranks.is_main:
            here = progress.copy()
            here.note_setup(self._config, self._placement)
            here.replay = True
            base = digest(encode_agents(agents))
            position = Position(base, [each["steps"] for each in everyones], horizon, training_seconds, dict(seconds))
            files[STATE] = json_bytes({"progress": asdict(here), "position": asdict(position)})
        return self._writer.write(self._checkpoints, self._number, files)

    def clear(self) -> None:
        """Remove all of them; one that cannot be removed is ignored when a later generation is resumed."""
        if self._host.leads:
            with contextlib.suppress(OSError, UserError):
                self._checkpoints.clear()

    def _damage(self) -> str:
        """Return what is wrong with the files that this rank needs, or ""."""
        ranks, checkpoints = self._ranks, self._checkpoints
        where = checkpoints.path(self._number)
        needed = {environments_file(ranks.rank), *(part_file(name, ranks.rank) for name in PARTS)}
        try:
            files = checkpoints.verify(self._number) if self._host.leads else checkpoints.files(self._number)
            if ranks.is_main:
                needed.add(STATE)
                self._read(checkpoints.read(self._number, STATE))
        except UserError as error:
            return str(error)
        missing = needed - files.keys()
        return f"{where}: lacks {min(missing)} on {socket.gethostname()}" if missing else ""

    def _read(self, payload: bytes) -> tuple[Position, Progress]:
        """Parse the state of one. Raises UserError if it is invalid."""
        where = self._checkpoints.path(self._number) / STATE
        try:
            parts = parse_json(payload)
            position = POSITION.validate_python(parts["position"])
            progress = progress_of(json_bytes(parts["progress"]), str(where))
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: is no state of a generation in progress") from error
        if len(position.steps) != progress.ranks or max(position.steps) > position.horizon:
            raise UserError(f"{where}: has other steps than its ranks can have done")
        return position, progress

    def _restore_environments(self, generation: int) -> str:
        """Let the running episodes of this rank go on; return why they cannot, or ""."""
        rank = self._ranks.rank
        seed = derive_seed(self._config.seed, generation=generation, rank=rank, purpose="environments")
        path = self._checkpoints.path(self._number) / environments_file(rank)
        try:
            tensors, _ = decode_tensors(self._checkpoints.read(self._number, path.name), "the running episodes")
            lost = self._environments.restore(tensors, seed)
        except UserError as error:
            return f"{path}: {error}"
        return f"{path}: the running episode cannot be played again in {lost}" if lost else ""

    def _first(self, problem: str) -> str:
        """Return the first problem of any rank, the same on all of them, or ""."""
        everyones = self._ranks.gather_bytes(problem.encode(), "the other ranks' interim checkpoints")
        return next((each.decode() for each in everyones if each), "")

    def _refuse(self, problem: str, so: str) -> bool:
        """Set the newest one aside, and say why and what follows; return False."""
        if self._ranks.is_main:
            self._warn_once(problem, f"{problem}; {so}")
        moved = ""
        if self._host.leads:
            try:
                self._checkpoints.set_aside(self._number)
            except OSError as error:
                moved = f"run.directory: cannot write to {self._checkpoints.path(self._number)}: {error.strerror}"
        self._ranks.raise_if_any_failed(moved, "the hosts' run directories")
        return False
