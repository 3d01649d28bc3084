"""The resumption of a run from its newest checkpoint that is whole on all hosts."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evorl.algorithms import Algorithm, Experience
from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.envs.continuation import Continued
from evorl.population import check_agents, check_environment_hyperparameters
from evorl.randomness import derive_seed
from evorl.runs.checkpoint import AGENTS, ELITE, STATE, Checkpoints, environments_file, replay_file
from evorl.runs.host_directory import HostDirectory
from evorl.runs.progress import Progress, progress_of
from evorl.runs.warn_once import WarnOnce
from evorl.system.console import say
from evorl.system.files import json_bytes
from evorl.system.formats import decode_agents, decode_tensors
from evorl.types import Agent, UserError


@dataclass(frozen=True)
class RestoredRun:
    """The contents of a checkpoint, the same on all ranks; `elite` is a file of one agent."""

    progress: Progress
    agents: list[Agent]
    elite: bytes


@dataclass(frozen=True)
class Recovery:
    """Finds the checkpoint to go on from, together with all ranks, and restores what it holds.

    `environments` are those whose episodes run on from one generation into the next, if any do.
    """

    config: AnyConfig
    placement: Placement
    algorithm: Algorithm
    experience: Experience
    environments: Continued | None
    host: HostDirectory
    warn_once: WarnOnce

    @property
    def checkpoints(self) -> Checkpoints:
        return self.host.directory.checkpoints

    def restore(self) -> RestoredRun | None:
        """Return what the newest checkpoint holds that is whole on all hosts; None where there has never been one.

        The directory is then what it was when that was made. Raises UserError where there are checkpoints and none is
        whole; nothing has been changed then.
        """
        ranks, checkpoints = self.placement.ranks, self.checkpoints
        generations: list[int] = json.loads(ranks.from_main(self._listed, "the checkpoints"))
        again = 0
        for generation in reversed(generations):
            replies = ranks.gather_bytes(self._problem(generation).encode(), "the other hosts' checkpoints")
            problem = next((reply.decode() for reply in replies if reply), None)
            if problem is None:
                restored = self._load(generation)
                shortened = self._is_too_short(restored.progress)
                if shortened and (generation == 1 or generation - 1 in generations):
                    again = generation
                    continue
                missing = self._load_replay(generation, restored.progress)
                lost = self._load_environments(generation, restored.progress)
                if shortened:
                    lost.append(f"generation {generation} was cut short, and the checkpoint before it is gone")
                self._warn_where_inexact(restored.progress, missing, lost)
                why = self._announce(again)
                self.host.rollback(generation, restored.elite, restored.progress.elite.generation, why)
                return restored
            if ranks.is_main:
                self.warn_once(problem, f"{problem}; looking at the checkpoint before it")
        if generations and not again:
            raise UserError(
                f"run.resume: no checkpoint in {checkpoints.directory} is whole; they were left as they are, and with "
                "another run.name training begins anew",
                reported_elsewhere=not ranks.is_main,
            )
        self.host.rollback(0, b"", None, self._announce(again))
        return None

    def _is_too_short(self, progress: Progress) -> bool:
        """Return whether the last generation would have had more steps, if the run had had its steps from the start."""
        limit = progress.shortened_by
        return limit is not None and self.config.training.max_steps > limit and not progress.is_solved(self.config)

    def _announce(self, again: int) -> str:
        """Say which generation is trained `again`, if one is, and return what its checkpoint is called then."""
        if again and self.placement.ranks.is_main:
            aside = self.checkpoints.path(again).name
            say(
                f"generation {again} was cut short by training.max_steps: it is trained again with all its steps, as "
                f"if the run had had them from the start; what it came to is in checkpoints/shortened-{aside}"
            )
        return "shortened" if again else "damaged"

    def _listed(self) -> bytes:
        """Return the generations with checkpoints. Raises UserError where they are gone, and not what they led to."""
        directory, generations = self.host.directory, self.checkpoints.generations()
        if not generations and any(row["generation"] > 1 for row in directory.metrics.rows()):
            raise UserError(
                f"run.resume: {directory.path} has been trained before, but has no checkpoint; it was left as it is, "
                "and with another run.name training begins anew"
            )
        return json_bytes(generations)

    def _problem(self, generation: int) -> str:
        """Return why this host cannot resume from a generation. A host that has no checkpoints at all is new."""
        checkpoints = self.checkpoints
        try:
            if self.placement.ranks.is_main:
                files = checkpoints.verify(generation)
                if not {AGENTS, STATE} <= files.keys():
                    return f"{checkpoints.path(generation)}: lacks the agents or state.json"
            elif self.host.leads and checkpoints.generations():
                if generation not in checkpoints.generations():
                    return f"{checkpoints.path(generation)}: is not there on {socket.gethostname()}"
                checkpoints.verify(generation)
        except UserError as error:
            return str(error)
        return ""

    def _load(self, generation: int) -> RestoredRun:
        """Return the main process's files of a checkpoint, validated, on all ranks. Raises UserError."""
        ranks, where = self.placement.ranks, self.checkpoints.path(generation)
        size = self.config.population.size
        state = ranks.from_main(lambda: self._read_state(generation), "the run's state")
        progress = progress_of(state, str(where))
        agents = ranks.from_main(lambda: self._read_agents(progress, AGENTS, size), "the checkpoint's agents")
        elite = ranks.from_main(lambda: self._read_elite(progress), "the checkpoint's elite")
        return RestoredRun(progress, decode_agents(agents, str(where)), elite)

    def _read_state(self, generation: int) -> bytes:
        """Return the file of the run's progress. Raises UserError where it is not that of this generation."""
        payload, path = self.checkpoints.read(generation, STATE), self.checkpoints.path(generation) / STATE
        if progress_of(payload, str(path)).generation != generation:
            raise UserError(f"{path}: is of another generation")
        return payload

    def _read_elite(self, progress: Progress) -> bytes:
        """Return the file of the elite, empty where there was none yet. Raises UserError."""
        return self._read_agents(progress, ELITE, 1) if ELITE in self.checkpoints.files(progress.generation) else b""

    def _read_agents(self, progress: Progress, name: str, count: int) -> bytes:
        """Return a file of so many agents. Raises UserError where they are others, or the algorithm cannot use them."""
        generation = progress.generation
        payload, path = self.checkpoints.read(generation, name), str(self.checkpoints.path(generation) / name)
        agents = decode_agents(payload, path)
        if len(agents) != count:
            raise UserError(f"{path}: holds {len(agents)} agents, not {count}")
        check_agents(agents, self.algorithm, path)
        check_environment_hyperparameters(agents, self.config, path)
        if problem := progress.contradicts(agents):
            raise UserError(f"{path}: {problem}")
        return payload

    def _load_replay(self, generation: int, progress: Progress) -> int:
        """Give every rank its part of the replay; gives the number of parts that no host has. Raises UserError."""
        ranks, checkpoints = self.placement.ranks, self.checkpoints
        parts = [replay_file(rank) for rank in range(progress.ranks)] if progress.replay else []
        missing, problem = 0, ""
        for name in parts[ranks.rank :: ranks.size]:
            path = checkpoints.path(generation) / name
            if not path.is_file():
                missing += 1
                continue
            try:
                rows, numbers = decode_tensors(checkpoints.read(generation, name), "the replay")
                self.experience.restore(rows, numbers)
            except UserError as error:
                problem = f"{path}: {error}"
        ranks.raise_if_any_failed(problem, "the replay")
        return int(ranks.gather(np.array([float(missing)]), "the parts of the replay").sum())

    def _load_environments(self, generation: int, progress: Progress) -> list[str]:
        """Let every rank's environments go on with their episodes; say which cannot. Raises UserError."""
        environments, ranks = self.environments, self.placement.ranks
        if environments is None:
            return []
        if not environments.can_continue or progress.moved(self.config, self.placement):
            return ["running episodes begin anew"]
        name, lost, problem = environments_file(ranks.rank), "", ""
        path = self.checkpoints.path(generation) / name
        if path.is_file():
            seed = derive_seed(self.config.seed, generation=generation + 1, rank=ranks.rank, purpose="environments")
            try:
                tensors, _ = decode_tensors(self.checkpoints.read(generation, name), "the running episodes")
                lost = environments.restore(tensors, seed)
            except UserError as error:
                problem = f"{path}: {error}"
        else:
            lost = "any environment"
        ranks.raise_if_any_failed(problem, "the running episodes")
        replies = ranks.gather_bytes(lost.encode(), "the environments that begin new episodes")
        return [
            f"the running episode cannot be played again in {reply.decode()} on rank {rank}, so that another begins"
            for rank, reply in enumerate(replies)
            if reply
        ]

    def _warn_where_inexact(self, progress: Progress, missing: int, lost: Sequence[str]) -> None:
        """Say why the run will not be what it would have been without the interruption, if it will not."""
        reasons = [*progress.changes_of_setup(self.config, self.placement), *lost]
        if self.config.actors is not None and not self.config.actors.lockstep:
            reasons.append("actors run freely")
        if not progress.replay:
            reasons.append("the replay was too large to be kept")
        if missing:
            reasons.append(f"{missing} parts of the replay are not on these hosts")
        if reasons and self.placement.ranks.is_main:
            self.warn_once("exact", f"this resume is not bit-exact: {', '.join(reasons)}")
