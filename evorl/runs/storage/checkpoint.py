"""The checkpoints of a run, after each generation and within one, and resuming from the newest.

Both kinds have the same files, and are restored in the same way: agents, elite, archive and `state.json` of the main
process, and each rank's experience and running episodes. One within a generation also has each rank's policy and
learner. Every rank writes its files; all methods are collective.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.envs import SteppedEnvironments
from evorl.population import Learner, Policy, check_agents
from evorl.replay import Experience
from evorl.replay.replay import ReplayExperience
from evorl.runs.storage.checkpoint_files import (
    AGENTS,
    ARCHIVE,
    ELITE,
    ENVIRONMENTS,
    EXPERIENCE,
    PARTS,
    STATE,
    Checkpoints,
    part_file,
)
from evorl.runs.storage.directory import CANNOT_WRITE, RunDirectory
from evorl.runs.storage.progress import Position, Progress, progress_of
from evorl.seeding import derive_seed
from evorl.system.console import WarnOnce
from evorl.system.files import file_errors, json_bytes
from evorl.system.formats import decode_agents, decode_tensors, encode_tensors
from evorl.types.agents import Agent
from evorl.types.messages import on_one_line
from evorl.types.outcomes import EnvironmentRaised, UserError
from evorl.types.tensors import Tensors

OTHERS = "the other ranks' running episodes"
Loaded = TypeVar("Loaded")


Part = Policy | Learner | Experience
"""A part of the training that changes from step to step."""


@dataclass
class CheckpointManager:
    """Saves the checkpoints of a run and restores the newest one."""

    config: AnyConfig
    placement: Placement
    algorithm: Algorithm
    experience: Experience
    environments: SteppedEnvironments | None
    carries_over: bool
    """True if running episodes of the `environments` continue into the next generation."""
    directory: RunDirectory
    warn_once: WarnOnce

    def __post_init__(self) -> None:
        self._ranks = self.placement.ranks
        self._number = 0
        """The number of the newest checkpoint within a generation, or 0."""
        minutes = self.config.checkpoint.minutes
        self._interval = None if minutes is None else 60 * minutes
        self._restart_clock()

    @property
    def is_due(self) -> bool:
        """True if it is time to save within a generation; only the main process keeps the time."""
        return self._interval is not None and self._ranks.is_main and time.monotonic() >= self._due

    def postpone(self) -> None:
        """Wait a little before the next one is due, because a rank was not within the generation."""
        self._due = time.monotonic() + min(1.0, self._interval or 1.0)

    def _restart_clock(self) -> None:
        self._due = time.monotonic() + (self._interval or 0.0)

    def save(self, progress: Progress, agents: bytes) -> str:
        """Save a generation, with the next one's `agents`, encoded on the main process.

        If a disk fails, warn and let training continue. Returns the problem, the same on all ranks and empty on
        success.
        """
        generation = progress.generation
        progress.note_setup(self.config, self.placement)
        state = self.experience.state_dict()
        too_large = self._too_large(state)
        progress.replay = not too_large
        if too_large:
            self.warn_once("replay", f"{too_large}, and is not kept; a resumed run will not be bit-exact")
        states = {EXPERIENCE: state} if progress.replay else {}
        environments = self.environments if self.carries_over else None
        if environments is not None and (episodes := environments.state_dict()):
            states[ENVIRONMENTS] = episodes
        problem = self._write(self.directory.checkpoints, generation, progress, agents, states)
        if problem:
            lost = f"generation {generation} has no checkpoint: {problem}; training goes on, but later progress is lost"
            self.warn_once("checkpoint", f"{lost} if the run ends before a later one succeeds")
            return problem
        self.warn_once.reset("checkpoint")
        if self._ranks.is_main:
            self._prune(self.directory.checkpoints, self.config.checkpoint.keep, progress.elite.generation)
            # One that remains is ignored, since a later generation is resumed.
            with contextlib.suppress(OSError, UserError):
                self.directory.interim.clear()
        return ""

    def save_within(
        self, progress: Progress, agents: bytes, parts: Sequence[Part], done: int, position: Position
    ) -> str:
        """Save a generation that began with `agents`, encoded on the main process, after `done` steps of this rank.

        `position` lacks the steps of the ranks. Returns the problem, the same on all ranks and empty on success.
        """
        ranks, environments = self._ranks, self.environments
        self._number += 1
        self._restart_clock()
        states: dict[str, Tensors] = {}
        problem = ""
        # An error in a native environment may take this ability from one rank alone, and the others wait below.
        if environments is None or not environments.can_continue:
            problem = "episodes of these environments cannot go on in another process"
        else:
            try:
                states[ENVIRONMENTS] = environments.state_dict()
            except Exception as error:  # Environments may raise anything, and a signal may have ended their processes.
                problem = f"the state of the environments cannot be read: {on_one_line(repr(error), 200)}"
        if problem := ranks.first_problem(problem, OTHERS):
            return problem
        states |= {name: part.state_dict() for name, part in zip(PARTS, parts, strict=True)}
        if too_large := self._too_large(states[EXPERIENCE]):
            return too_large
        steps = [int(reply) for reply in ranks.gather_bytes(str(done).encode(), "the other ranks' steps")]
        within = replace(progress, replay=True, position=replace(position, steps=steps))
        within.note_setup(self.config, self.placement)
        problem = self._write(self.directory.interim, self._number, within, agents, states)
        if not problem and ranks.is_main:
            self._prune(self.directory.interim, keep=1)
        return problem

    def _write(
        self, checkpoints: Checkpoints, number: int, progress: Progress, agents: bytes, states: Mapping[str, Tensors]
    ) -> str:
        """Write a checkpoint from the `states` of every rank; return the problem, empty on success."""
        files = {part_file(name, self._ranks.rank): encode_tensors(state) for name, state in states.items()}
        if self._ranks.is_main:
            files |= {AGENTS: agents, STATE: json_bytes(asdict(progress))}
            if progress.elite.payload:
                files[ELITE] = progress.elite.payload
            if progress.archive:
                files[ARCHIVE] = progress.archive
        return self.directory.write_checkpoint(self._ranks, checkpoints, number, files)

    def _too_large(self, experience: Tensors) -> str:
        """Why all ranks' replay together is not saved, or ""; rollouts always are."""
        if not isinstance(self.experience, ReplayExperience):
            return ""
        size = sum(value.nbytes for value in experience.values())
        replies = self._ranks.gather_bytes(str(size).encode(), "the sizes of the replay")
        total, limit = sum(map(int, replies)) / 1e6, self.config.checkpoint.max_replay_mb
        return f"the replay takes {total:.0f} MB, more than checkpoint.max_replay_mb {limit:g}" if total > limit else ""

    def _prune(self, checkpoints: Checkpoints, keep: int, best: int | None = None) -> None:
        """Remove all but the newest `keep` checkpoints and that of generation `best`; warn if that fails."""
        try:
            with file_errors(checkpoints.directory, "old checkpoints could not be removed: "):
                checkpoints.prune(keep, best)
        except UserError as error:
            self.warn_once("prune", str(error))

    def reload(self, payload: bytes, generation: int) -> list[Agent]:
        """The main process's agents on all ranks, from the `payload` that it has saved."""
        payload = self._ranks.broadcast_bytes(payload, "the evolved agents")
        return decode_agents(payload, str(self.directory.checkpoints.path(generation) / AGENTS))

    def restore(self) -> tuple[Progress, list[Agent]] | None:
        """Restore the newest intact checkpoint; None if training starts from the beginning.

        With a `position`, the progress is within a generation, and `resume` restores the rest. The directory is
        unchanged until `roll_back`, except that a damaged checkpoint within a generation is renamed. Raises UserError
        if the run has been trained, but no checkpoint is intact.
        """
        ranks, checkpoints = self._ranks, self.directory.checkpoints
        generations, self._number, within, trained = json.loads(ranks.from_main(self._listed, "the checkpoints"))
        candidates = [(generation, False) for generation in generations]
        for generation, is_interim in sorted([*candidates, *([(within, True)] if within is not None else [])])[::-1]:
            if is_interim:
                if restored := self._restore_interim():
                    return restored
                continue
            problem = self._damage(checkpoints, generation)
            if problem:
                if ranks.is_main:
                    self.warn_once(problem, f"{problem}; looking at the checkpoint before it")
                continue
            progress, agents = self._load(checkpoints, generation)
            self._load_experience(progress)
            lost = self._continue_episodes(progress)
            limit = progress.shortened_by
            if limit is not None and self.config.training.max_steps > limit and not progress.is_solved(self.config):
                lost.append(f"generation {generation} was cut short by training.max_steps={limit}")
            self._warn_where_inexact(progress, lost)
            return progress, agents
        if trained:
            raise UserError(
                f"run.resume: {self.directory.path} has been trained, but none of its checkpoints can be used; nothing "
                "was changed. A checkpoint within a generation can be resumed only on the number of processes that "
                "saved it. To start from scratch, choose another run.name",
                reported_elsewhere=not ranks.is_main,
            )
        return None

    def _listed(self) -> bytes:
        """As JSON: the generations with checkpoints; the number of the newest one within a generation, or 0, and its
        last complete generation, or None; and whether the run has been trained.

        A damaged one within a generation is set aside. Raises UserError.
        """
        interim, within = self.directory.interim, None
        number = max(interim.generations(), default=0)
        if number and self.config.actors is None:
            try:
                within = self._state(interim, number).generation
            except UserError as error:
                self._set_aside(str(error))
        generations = self.directory.checkpoints.generations()
        return json_bytes([generations, number, within, bool(generations) or self.directory.has_trained()])

    def _restore_interim(self) -> tuple[Progress, list[Agent]] | None:
        """Restore the newest checkpoint within a generation; None if its generation starts over, with a warning."""
        ranks, interim = self._ranks, self.directory.interim
        problem = self._damage(interim, self._number)
        if not problem:
            progress, agents = self._load(interim, self._number)
            if progress.moved(self.config, self.placement):
                if ranks.is_main:
                    changes = ", ".join(progress.changes_of_setup(self.config, self.placement))
                    self.warn_once("interim", f"{interim.path(self._number)}: its generation starts over, as {changes}")
                return None
            problem = self._continue_within(progress)
        if problem:
            ranks.from_main(lambda: self._set_aside(problem), "the run directory")
            return None
        self._warn_where_inexact(progress, ())
        return progress, agents

    def _set_aside(self, problem: str) -> bytes:
        """Rename the newest checkpoint within a generation, on the main process, and say why. Raises UserError."""
        self.warn_once(problem, f"{problem}; its generation starts over")
        with file_errors(self.directory.interim.path(self._number), CANNOT_WRITE):
            self.directory.interim.set_aside(self._number)
        return b""

    def resume(self, progress: Progress, parts: Sequence[Part]) -> int:
        """Load the parts of a restored checkpoint within a generation; return this rank's steps in it.

        Raises UserError on all ranks.
        """
        assert progress.position is not None
        rank, where = self._ranks.rank, self.directory.interim.path(self._number)
        if not parts:
            raise UserError(f"{where}: was saved within a generation; give `Run.steps` its parts, as was done then")
        with self._ranks.together("the interim checkpoint"):
            try:
                for name, part in zip(PARTS, parts, strict=True):
                    self._load_file(self.directory.interim, self._number, part_file(name, rank), part.load_state_dict)
            except UserError as error:
                raise UserError(f"{error}; remove this directory to restart its generation") from error
        steps = progress.position.steps[rank]
        progress.position = None
        return steps

    def roll_back(self, progress: Progress) -> None:
        """Roll the directory back to the restored progress, or to that of a new run. Raises UserError on all ranks."""

        def cut_back() -> bytes:
            with file_errors(self.directory.path, CANNOT_WRITE):
                # An interruption in between is repaired: a checkpoint whose lines are missing is rolled back again.
                self.directory.cut_back(progress.generation, progress.elite.payload)
                self.directory.checkpoints.set_aside(progress.generation + 1)
            return b""

        self._ranks.from_main(cut_back, "the run directory")
        if self._ranks.is_main:
            self._prune(self.directory.checkpoints, self.config.checkpoint.keep, progress.elite.generation)

    def _damage(self, checkpoints: Checkpoints, number: int) -> str:
        """The reason why the run cannot resume from a checkpoint, the same on all ranks, or ""."""

        def look() -> bytes:
            try:
                files, needed = checkpoints.verify(number).keys(), {AGENTS, STATE}
                if checkpoints is self.directory.interim:
                    ranks = range(self._state(checkpoints, number).ranks)
                    needed |= {part_file(name, rank) for rank in ranks for name in (ENVIRONMENTS, *PARTS)}
                if missing := needed - files:
                    return f"{checkpoints.path(number)}: lacks {min(missing)}".encode()
            except UserError as error:
                return str(error).encode()
            return b""

        return self._ranks.from_main(look, "the checkpoint").decode()

    def _load(self, checkpoints: Checkpoints, number: int) -> tuple[Progress, list[Agent]]:
        """Load and validate the main process's files of a checkpoint, on all ranks. Raises UserError."""
        ranks, where = self._ranks, checkpoints.path(number)
        read = partial(self._read_agents, checkpoints, number)
        state = ranks.from_main(lambda: json_bytes(asdict(self._state(checkpoints, number))), "the run's state")
        progress, size = progress_of(state, str(where)), self.config.population.agents
        agents = ranks.from_main(lambda: read(AGENTS, size), "the checkpoint's agents")
        progress.elite.payload = ranks.from_main(
            lambda: read(ELITE, 1) if ELITE in checkpoints.files(number) else b"", "the checkpoint's elite"
        )
        if progress.league is not None and progress.league.archive:
            archived = len(progress.league.archive)
            progress.archive = ranks.from_main(lambda: read(ARCHIVE, archived), "the checkpoint's archive")
        return progress, decode_agents(agents, str(where))

    def _state(self, checkpoints: Checkpoints, number: int) -> Progress:
        """The contents of `state.json`. Raises UserError."""
        return progress_of(checkpoints.read(number, STATE), str(checkpoints.path(number) / STATE))

    def _read_agents(self, checkpoints: Checkpoints, number: int, name: str, count: int) -> bytes:
        """The contents of a file of `count` agents. Raises UserError if they do not fit the run."""
        payload, path = checkpoints.read(number, name), str(checkpoints.path(number) / name)
        agents = decode_agents(payload, path)
        if len(agents) != count:
            raise UserError(f"{path}: holds {len(agents)} agents, not {count}")
        for agent in agents:  # One at a time: the archive may hold several versions of one agent, and so an id twice.
            check_agents([agent], self.algorithm, path)
        return payload

    def _load_file(self, checkpoints: Checkpoints, number: int, file: str, load: Callable[[Tensors], Loaded]) -> Loaded:
        """Give the tensors in a file of a checkpoint to `load`. Raises UserError with the file's path."""
        payload = checkpoints.read(number, file)
        try:
            return load(decode_tensors(payload, "its tensors"))
        except EnvironmentRaised:
            raise
        except UserError as error:
            raise UserError(f"{checkpoints.path(number) / file}: {error}") from error

    def _load_experience(self, progress: Progress) -> None:
        """Restore this rank's part of the replay, unless ranks have other parts now. Raises UserError."""
        if not progress.replay or progress.regrouped(self.placement):
            return
        file = part_file(EXPERIENCE, self._ranks.rank)
        with self._ranks.together("the replay"):
            self._load_file(self.directory.checkpoints, progress.generation, file, self.experience.load_state_dict)

    def _continue_episodes(self, progress: Progress) -> list[str]:
        """Continue the running episodes of every rank after a generation; describe those that cannot be."""
        ranks = self._ranks
        if self.environments is None or not self.carries_over:
            return []
        if not self.environments.can_continue or progress.moved(self.config, self.placement):
            return ["running episodes begin anew"]
        with ranks.together(OTHERS):
            lost = self._replay_episodes(self.environments, progress)
        replies = ranks.gather_bytes(lost.encode(), OTHERS)
        return [f"{reply.decode()} on rank {rank}" for rank, reply in enumerate(replies) if reply]

    def _continue_within(self, progress: Progress) -> str:
        """Continue the running episodes of every rank within a generation; return why that is impossible, or ""."""
        problem = "episodes of actors are not saved"
        if self.environments is not None:
            try:
                problem = self._replay_episodes(self.environments, progress)
            except EnvironmentRaised:
                raise
            except UserError as error:
                problem = str(error)
        return self._ranks.first_problem(problem, OTHERS)

    def _replay_episodes(self, environments: SteppedEnvironments, progress: Progress) -> str:
        """Continue the running episodes of this rank; return where that is impossible, or "". Raises UserError."""
        checkpoints, number = self.directory.checkpoints, progress.generation
        if progress.position is not None:
            checkpoints, number = self.directory.interim, self._number
        rank, file = self._ranks.rank, part_file(ENVIRONMENTS, self._ranks.rank)
        seed = derive_seed(self.config.seed, generation=progress.generation + 1, rank=rank, purpose="environments")
        lost = "any environment"
        if file in checkpoints.files(number):
            lost = self._load_file(checkpoints, number, file, partial(environments.load_state_dict, seed=seed))
        where = checkpoints.path(number) / file
        return f"{where}: the running episode cannot be replayed in {lost}" if lost else ""

    def _warn_where_inexact(self, progress: Progress, lost: Sequence[str]) -> None:
        reasons = [*progress.changes_of_setup(self.config, self.placement), *lost]
        if self.config.actors is not None and not self.config.actors.lockstep:
            reasons.append("actors run freely")
        elif self.config.actors is not None and self.carries_over:
            reasons.append("actors begin new episodes")
        if isinstance(self.experience, ReplayExperience):
            if progress.regrouped(self.placement):
                reasons.append("the replay starts empty")
            elif not progress.replay:
                reasons.append("the replay was too large to be kept")
        if reasons and self._ranks.is_main:
            self.warn_once("exact", f"this resume is not bit-exact: {', '.join(reasons)}")
