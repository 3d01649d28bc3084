"""The checkpoints of a run after each generation and within one, and resuming from the newest.

Every rank writes its files and reloads the agents.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Protocol, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.errors import on_one_line
from evorl.distributed import Placement
from evorl.envs import Environments
from evorl.population import check_agents, check_environment_hyperparameters
from evorl.replay import Experience
from evorl.replay.replay import ReplayExperience
from evorl.runs.directory import (
    AGENTS,
    ARCHIVE,
    CANNOT_WRITE,
    ELITE,
    ENVIRONMENTS,
    PARTS,
    REPLAY,
    STATE,
    Checkpoints,
    RunDirectory,
    part_file,
)
from evorl.runs.progress import Progress, progress_of
from evorl.seeding import derive_seed
from evorl.system.console import WarnOnce, say
from evorl.system.files import digest, file_errors, json_bytes, parse_json
from evorl.system.formats import decode_agents, decode_tensors, encode_agents, encode_tensors
from evorl.types import Agent, Number, Tensors, UserError, Words


def bytes_of(tensors: Tensors) -> int:
    """The size of all tensors in bytes."""
    return sum(value.nbytes for value in tensors.values())


OTHERS = "the other ranks' interim checkpoints"
Loaded = TypeVar("Loaded")


def load_file(checkpoints: Checkpoints, number: int, file: str, load: Callable[[Tensors], Loaded]) -> Loaded:
    """Give the tensors in a file of a checkpoint to `load`. Raises UserError with the file's path."""
    payload = checkpoints.read(number, file)
    try:
        return load(decode_tensors(payload, "its tensors"))
    except UserError as error:
        raise UserError(f"{checkpoints.path(number) / file}: {error}") from error


def prune(checkpoints: Checkpoints, warn_once: WarnOnce, best: int | None = None) -> None:
    """Remove older checkpoints, except that of generation `best`; warn if that fails."""
    try:
        with file_errors(checkpoints.directory, "old checkpoints could not be removed: "):
            checkpoints.prune(best)
    except UserError as error:
        warn_once("prune", str(error))


class Part(Protocol):
    """A part of the training that changes from step to step."""

    def state_dict(self) -> Tensors:
        """The state of this part on this rank."""

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict` at the beginning of the same generation. Raises UserError."""


Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Position:
    """Progress within a generation: the vector steps that each rank has done, of `horizon`, and the seconds they took.

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
        environments: Environments | None,
        directory: RunDirectory,
        warn_once: WarnOnce,
    ) -> None:
        self.position: Position | None = None
        self.progress: Progress | None = None
        self._config = config
        self._placement = placement
        self._ranks = placement.ranks
        self._environments = environments
        self._directory = directory
        self._checkpoints = directory.interim
        self._warn_once = warn_once
        self._number = 0
        minutes = config.checkpoint.minutes
        self._interval = None if minutes is None else 60 * minutes
        self.restart_clock()

    @property
    def is_due(self) -> bool:
        """True if it is time to save again; only the main process keeps the time."""
        return self._interval is not None and self._ranks.is_main and time.monotonic() >= self._due

    def restart_clock(self) -> None:
        """Wait `checkpoint.minutes` before the next one is due."""
        self._due = time.monotonic() + (self._interval or 0.0)

    def postpone(self) -> None:
        """Wait a little before the next one is due, because a rank was not within the generation."""
        self._due = time.monotonic() + min(1.0, self._interval or 1.0)

    def find(self, generation: int, agents: Sequence[Agent]) -> bool:
        """True if there is an interim checkpoint of the generation after `generation`, which begins with `agents`.

        Its running episodes are then restored. A checkpoint that is damaged, or whose episodes cannot be restored, is
        renamed.
        """
        if self._config.actors is not None:
            return False
        ranks, checkpoints = self._ranks, self._checkpoints
        self._number = json.loads(ranks.from_main(self._newest, "interim checkpoints"))
        if not self._number:
            self.clear()
            return False
        if problem := ranks.from_main(self._damage, OTHERS).decode():
            return self._refuse(problem, generation)
        position, progress = self._read(ranks.from_main(lambda: checkpoints.read(self._number, STATE), "its state"))
        if progress.generation < generation:
            self.clear()
            return False
        if progress.generation > generation or position.base != digest(encode_agents(agents)):
            return self._refuse(
                f"{checkpoints.path(self._number)}: belongs to a generation that started with other agents", generation
            )
        where = f"{checkpoints.path(self._number)}: generation {generation + 1} starts over"
        if progress.moved(self._config, self._placement):
            if ranks.is_main:
                there = (
                    f"{progress.ranks} {progress.placement} ranks ({progress.device}) with {progress.vectorization} "
                    "environments"
                )
                self._warn_once(
                    "interim", f"{where}: this checkpoint is from {there}, and can be resumed only with that setup"
                )
            return False
        if lost := ranks.first_problem(self._restore_environments(generation + 1), OTHERS):
            return self._refuse(lost, generation)
        self.position, self.progress = position, progress
        return True

    def _newest(self) -> bytes:
        """The number of the newest interim checkpoint as JSON; 0 without any. Raises UserError."""
        return json_bytes(max(self._checkpoints.generations(), default=0))

    def resume(self, parts: Sequence[Part]) -> int:
        """Load the one that was found into the parts; return this rank's steps in it. Raises UserError on all ranks."""
        assert self.position is not None
        problem, rank = "", self._ranks.rank
        for name, part in zip(PARTS, parts, strict=True):
            file = part_file(name, rank)
            try:
                load_file(self._checkpoints, self._number, file, part.load_state_dict)
            except UserError as error:
                problem = problem or f"{error}; remove this directory to restart its generation"
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
        unsaved: str = "",
    ) -> str:
        """Save a generation that began with `agents`, after `done` of `horizon` steps on this rank.

        A resume also needs the preceding checkpoint; `unsaved` says why this rank has none, if so. Returns the problem,
        empty on success.
        """
        ranks, rank = self._ranks, self._ranks.rank
        self._number += 1
        self.restart_clock()
        states: dict[str, Tensors] = {}
        mine = {"steps": done, "bytes": 0.0, "problem": unsaved}
        # An error in a native environment may take this ability from one rank alone, and the others wait below.
        environments = self._environments
        if environments is None or not environments.can_continue:
            mine["problem"] = "episodes of these environments cannot go on in another process"
        else:
            states = {name: part.state_dict() for name, part in zip(PARTS, parts, strict=True)}
            mine["bytes"] = bytes_of(states["experience"])
        try:
            episodes = environments.state_dict() if environments is not None and states else {}
        except Exception as error:  # Environments may raise anything, and a signal may have ended their processes.
            mine["problem"] = f"the state of the environments cannot be read: {on_one_line(repr(error), 200)}"
        replies = [json.loads(reply) for reply in ranks.gather_bytes(json_bytes(mine), "the other ranks' steps")]
        if problem := next((reply["problem"] for reply in replies if reply["problem"]), ""):
            return str(problem)
        total, limit = sum(reply["bytes"] for reply in replies) / 1e6, self._config.checkpoint.max_replay_mb
        if total > limit:
            return f"the experience takes {total:.0f} MB, more than checkpoint.max_replay_mb {limit:g}"
        files = {part_file(name, rank): encode_tensors(state) for name, state in states.items()}
        files[part_file(ENVIRONMENTS, rank)] = encode_tensors(episodes)
        if ranks.is_main:
            here = progress.copy()
            here.note_setup(self._config, self._placement)
            here.replay = True
            base = digest(encode_agents(agents))
            position = Position(base, [reply["steps"] for reply in replies], horizon, training_seconds, dict(seconds))
            files[STATE] = json_bytes({"progress": asdict(here), "position": asdict(position)})
        problem = self._directory.write_checkpoint(ranks, self._checkpoints, self._number, files)
        if not problem and ranks.is_main:
            prune(self._checkpoints, self._warn_once)
        return problem

    def clear(self) -> None:
        """Remove all interim checkpoints; one that remains is ignored when a later generation is resumed."""
        if self._ranks.is_main:
            with contextlib.suppress(OSError, UserError):
                self._checkpoints.clear()

    def _damage(self) -> bytes:
        """A description of damage to the newest interim checkpoint, or b""."""
        checkpoints = self._checkpoints
        try:
            files = checkpoints.verify(self._number)
            _, progress = self._read(checkpoints.read(self._number, STATE))
        except UserError as error:
            return str(error).encode()
        expected = {part_file(name, rank) for rank in range(progress.ranks) for name in (ENVIRONMENTS, *PARTS)}
        missing = expected - files.keys()
        return f"{checkpoints.path(self._number)}: lacks {min(missing)}".encode() if missing else b""

    def _read(self, payload: bytes) -> tuple[Position, Progress]:
        """Parse the state of an interim checkpoint. Raises UserError if it is invalid."""
        where = self._checkpoints.path(self._number) / STATE
        try:
            parts = parse_json(payload)
            position = POSITION.validate_python(parts["position"])
            progress = progress_of(json_bytes(parts["progress"]), str(where))
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: is not the state of a generation in progress") from error
        if len(position.steps) != progress.ranks or max(position.steps) > position.horizon:
            raise UserError(f"{where}: its steps do not fit its number of ranks, or exceed the generation's length")
        return position, progress

    def _restore_environments(self, generation: int) -> str:
        """Continue the running episodes of this rank; return why that is impossible, or ""."""
        if self._environments is None:
            return f"{self._checkpoints.path(self._number)}: episodes of actors are not saved"
        rank, file = self._ranks.rank, part_file(ENVIRONMENTS, self._ranks.rank)
        seed = derive_seed(self._config.seed, generation=generation, rank=rank, purpose="environments")
        load = partial(self._environments.load_state_dict, seed=seed)
        try:
            lost = load_file(self._checkpoints, self._number, file, load)
        except UserError as error:
            return str(error)
        where = self._checkpoints.path(self._number) / file
        return f"{where}: the running episode cannot be replayed in {lost}" if lost else ""

    def _refuse(self, problem: str, generation: int) -> bool:
        """Set the newest one aside, and say why and that the generation after this one starts over; return False."""

        def set_aside() -> bytes:
            self._warn_once(problem, f"{problem}; generation {generation + 1} starts over")
            with file_errors(self._checkpoints.path(self._number), CANNOT_WRITE):
                self._checkpoints.set_aside(self._number)
            return b""

        self._ranks.from_main(set_aside, "the run directory")
        return False


class CheckpointManager:
    """Saves the checkpoints after each generation, and restores the newest one, collectively on all ranks.

    `interim` has the checkpoints within a generation.
    """

    def __init__(
        self,
        config: AnyConfig,
        placement: Placement,
        algorithm: Algorithm,
        experience: Experience,
        environments: Environments | None,
        carries_over: bool,
        directory: RunDirectory,
        warn_once: WarnOnce,
    ) -> None:
        """If `carries_over`, running episodes of the `environments` continue into the next generation."""
        self.interim = InterimCheckpoints(config, placement, environments, directory, warn_once)
        self._config = config
        self._placement = placement
        self._ranks = placement.ranks
        self._algorithm = algorithm
        self._experience = experience
        self._environments = environments if carries_over else None
        self._carries_over = carries_over
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._warn_once = warn_once
        self._again = 0
        """The short generation that is trained again in full, or 0."""
        self._restored: Progress

    def save(self, progress: Progress, agents: bytes) -> str:
        """Write a checkpoint from every rank's files. If a disk fails, warn and let training continue.

        `agents` are encoded, on the main process. Returns the problem, the same on all ranks and empty on success.
        """
        generation = progress.generation
        progress.note_setup(self._config, self._placement)
        files, best = self._files(progress, agents), progress.elite.generation
        problem = self._directory.write_checkpoint(self._ranks, self._checkpoints, generation, files)
        if problem:
            lost = f"generation {generation} has no checkpoint: {problem}; training goes on, but later progress is lost"
            self._warn_once("checkpoint", f"{lost} if the run ends before a later one succeeds")
        else:
            self._warn_once.reset("checkpoint")
            if self._ranks.is_main:
                prune(self._checkpoints, self._warn_once, best)
        return problem

    def reload(self, payload: bytes, generation: int) -> list[Agent]:
        """The main process's agents on all ranks, from the `payload` that it has saved."""
        payload = self._ranks.broadcast_bytes(payload, "the evolved agents")
        return decode_agents(payload, str(self._checkpoints.path(generation) / AGENTS))

    def _files(self, progress: Progress, agents: bytes) -> dict[str, bytes]:
        """This rank's files: its replay and running episodes; on the main process also agents, state, elite."""
        state = self._experience.state_dict()
        progress.replay = self._replay_is_kept(bytes_of(state))
        files = {part_file(REPLAY, self._ranks.rank): encode_tensors(state)} if progress.replay else {}
        if self._environments is not None and (episodes := self._environments.state_dict()):
            files[part_file(ENVIRONMENTS, self._ranks.rank)] = encode_tensors(episodes)
        if self._ranks.is_main:
            files |= {AGENTS: agents, STATE: json_bytes(asdict(progress))}
            if progress.elite.payload:
                files[ELITE] = progress.elite.payload
            if progress.archive:
                files[ARCHIVE] = progress.archive
        return files

    def _replay_is_kept(self, size: int) -> bool:
        """True if the replay parts of all ranks, this one being `size` bytes, total within the limit."""
        total = float(self._ranks.gather(np.array([float(size)]), "the sizes of the replay").sum()) / 1e6
        limit = self._config.checkpoint.max_replay_mb
        if total > limit:
            what = f"the replay takes {total:.0f} MB, more than checkpoint.max_replay_mb {limit:g}, and is not kept"
            self._warn_once("replay", f"{what}; a resumed run will not be bit-exact")
        return total <= limit

    def restore(self) -> tuple[Progress, list[Agent]] | None:
        """Restore the newest intact checkpoint; None if training starts from the beginning.

        The directory is unchanged until `roll_back`. Raises UserError if there are checkpoints but none is intact.
        """
        ranks, checkpoints = self._ranks, self._checkpoints
        generations: list[int] = json.loads(ranks.from_main(self._listed, "the checkpoints"))
        again = 0
        for generation in reversed(generations):
            problem = self._damage(generation)
            if not problem:
                progress, agents = self._load(generation)
                shortened = self._is_too_short(progress)
                if shortened and (generation == 1 or not self._damage(generation - 1)):
                    again = generation
                    continue
                going_on = self.interim.find(generation, agents)
                lost: list[str] = []
                if not going_on:
                    self._load_replay(generation, progress)
                    lost = self._load_environments(generation, progress)
                if shortened:
                    lost.append(
                        f"generation {generation} was cut short, and the checkpoint before it is gone or damaged"
                    )
                interim = self.interim.progress if going_on else None
                self._warn_where_inexact(interim or progress, lost)
                self._restored, self._again = progress, again
                return progress, agents
            if ranks.is_main:
                self._warn_once(problem, f"{problem}; looking at the checkpoint before it")
        if generations and again != 1:
            raise UserError(
                f"run.resume: every checkpoint in {checkpoints.directory} is damaged; nothing was changed, and with "
                "another run.name training starts from scratch",
                reported_elsewhere=not ranks.is_main,
            )
        self._again = again
        return None

    def roll_back(self) -> None:
        """Roll the directory back to the restored checkpoint (collective). Raises UserError on all ranks."""
        progress, elite = self._restored, self._restored.elite
        self._directory.rollback(self._ranks, progress.generation, elite.payload, self._announce(self._again))
        if self._ranks.is_main:
            prune(self._checkpoints, self._warn_once, elite.generation)

    def restore_first(self, agents: Sequence[Agent]) -> None:
        """Roll the directory back to the beginning of the first generation, which begins with `agents`.

        Also find that generation's interim checkpoint, if any.
        """
        self._directory.rollback(self._ranks, 0, b"", self._announce(self._again))
        if self.interim.find(0, agents) and self.interim.progress is not None:
            self._warn_where_inexact(self.interim.progress, ())

    def _is_too_short(self, progress: Progress) -> bool:
        """True if the last generation was cut short by a smaller `training.max_steps` than the current one."""
        limit = progress.shortened_by
        return limit is not None and self._config.training.max_steps > limit and not progress.is_solved(self._config)

    def _announce(self, again: int) -> str:
        """Announce the generation to be trained `again`, if not 0; return the prefix for checkpoints set aside."""
        if again and self._ranks.is_main:
            aside = self._checkpoints.path(again).name
            say(
                f"generation {again} was cut short by training.max_steps and is trained again in full; its checkpoint "
                f"is kept as checkpoints/shortened-{aside}"
            )
        return "shortened" if again else "damaged"

    def _listed(self) -> bytes:
        """The generations with checkpoints, as JSON."""
        return json_bytes(self._checkpoints.generations())

    def _damage(self, generation: int) -> str:
        """The reason why the run cannot resume from a generation, the same on all ranks, or ""."""

        def look() -> bytes:
            try:
                if not {AGENTS, STATE} <= self._checkpoints.verify(generation).keys():
                    return f"{self._checkpoints.path(generation)}: lacks the agents or state.json".encode()
            except UserError as error:
                return str(error).encode()
            return b""

        return self._ranks.from_main(look, "the checkpoint").decode()

    def _load(self, generation: int) -> tuple[Progress, list[Agent]]:
        """Load and validate the main process's files of a checkpoint, on all ranks. Raises UserError."""
        ranks, where = self._ranks, self._checkpoints.path(generation)
        size = self._config.population.size
        state = ranks.from_main(lambda: self._read_state(generation), "the run's state")
        progress = progress_of(state, str(where))
        agents = ranks.from_main(lambda: self._read_agents(progress, AGENTS, size), "the checkpoint's agents")
        progress.elite.payload = ranks.from_main(lambda: self._read_elite(progress), "the checkpoint's elite")
        if progress.league is not None and progress.league.archive:
            progress.archive = ranks.from_main(lambda: self._read_archive(progress), "the checkpoint's archive")
        return progress, decode_agents(agents, str(where))

    def _read_state(self, generation: int) -> bytes:
        """The contents of `state.json`. Raises UserError if it belongs to another generation."""
        payload, path = self._checkpoints.read(generation, STATE), self._checkpoints.path(generation) / STATE
        if progress_of(payload, str(path)).generation != generation:
            raise UserError(f"{path}: is of another generation")
        return payload

    def _read_elite(self, progress: Progress) -> bytes:
        """The contents of the elite's file, empty if there was no elite yet. Raises UserError."""
        return self._read_agents(progress, ELITE, 1) if ELITE in self._checkpoints.files(progress.generation) else b""

    def _read_archive(self, progress: Progress) -> bytes:
        """The contents of the league's file of agents. Raises UserError unless they are those of the standings."""
        assert progress.league is not None
        path = self._checkpoints.path(progress.generation) / ARCHIVE
        payload = self._checkpoints.read(progress.generation, ARCHIVE)
        agents = decode_agents(payload, str(path))
        if tuple(agent.id for agent in agents) != progress.league.archive:
            raise UserError(f"{path}: holds other agents than the league's standings")
        for agent in agents:  # One at a time: the archive may hold several versions of one agent, and so an id twice.
            check_agents([agent], self._algorithm, str(path))
        return payload

    def _read_agents(self, progress: Progress, name: str, count: int) -> bytes:
        """The contents of a file of `count` agents. Raises UserError if they do not fit the run."""
        generation = progress.generation
        payload, path = self._checkpoints.read(generation, name), str(self._checkpoints.path(generation) / name)
        agents = decode_agents(payload, path)
        if len(agents) != count:
            raise UserError(f"{path}: holds {len(agents)} agents, not {count}")
        check_agents(agents, self._algorithm, path)
        check_environment_hyperparameters(agents, self._config, path)
        return payload

    def _load_replay(self, generation: int, progress: Progress) -> None:
        """Restore this rank's part of the replay, unless ranks have other parts now. Raises UserError."""
        if not progress.replay or progress.regrouped(self._placement):
            return
        name, problem = part_file(REPLAY, self._ranks.rank), ""
        try:
            load_file(self._checkpoints, generation, name, self._experience.load_state_dict)
        except UserError as error:
            problem = str(error)
        self._ranks.raise_if_any_failed(problem, "the replay")

    def _load_environments(self, generation: int, progress: Progress) -> list[str]:
        """Restore the running episodes of every rank; describe those that cannot continue. Raises UserError."""
        environments, ranks = self._environments, self._ranks
        if environments is None:
            return []
        if not environments.can_continue or progress.moved(self._config, self._placement):
            return ["running episodes begin anew"]
        file, lost, problem = part_file(ENVIRONMENTS, ranks.rank), "any environment", ""
        seed = derive_seed(self._config.seed, generation=generation + 1, rank=ranks.rank, purpose="environments")
        try:
            if file in self._checkpoints.files(generation):
                load = partial(environments.load_state_dict, seed=seed)
                lost = load_file(self._checkpoints, generation, file, load)
        except UserError as error:
            problem = str(error)
        ranks.raise_if_any_failed(problem, "the running episodes")
        replies = ranks.gather_bytes(lost.encode(), "the environments that begin new episodes")
        return [
            f"the running episode cannot be replayed in {reply.decode()} on rank {rank}, so that another begins"
            for rank, reply in enumerate(replies)
            if reply
        ]

    def _warn_where_inexact(self, progress: Progress, lost: Sequence[str]) -> None:
        """Warn if the resume is not bit-exact, with the reasons."""
        reasons = [*progress.changes_of_setup(self._config, self._placement), *lost]
        if self._config.actors is not None and not self._config.actors.lockstep:
            reasons.append("actors run freely")
        elif self._config.actors is not None and self._carries_over:
            reasons.append("actors begin new episodes")
        if isinstance(self._experience, ReplayExperience):
            if progress.regrouped(self._placement):
                reasons.append("the replay starts empty")
            elif not progress.replay:
                reasons.append("the replay was too large to be kept")
        if reasons and self._ranks.is_main:
            self._warn_once("exact", f"this resume is not bit-exact: {', '.join(reasons)}")
