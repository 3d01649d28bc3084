"""The agents that a run starts from: new ones, another run's, or those of the newest checkpoint intact on all hosts."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.fields import ENVIRONMENT
from evorl.distributed import Peer, Placement, Ranks
from evorl.envs.continuation import Continued
from evorl.population import Learner, check_agents, check_environment_hyperparameters, initial_population
from evorl.replay import Experience
from evorl.runs.checkpoint import InterimCheckpoints, Progress, progress_of
from evorl.runs.directory import (
    AGENTS,
    ELITE,
    STATE,
    Checkpoints,
    HostDirectory,
    environments_file,
    load_elite,
    replay_file,
)
from evorl.seeding import derive_seed
from evorl.system.console import WarnOnce, say
from evorl.system.files import digest, json_bytes, refuse_links_within
from evorl.system.formats import decode_agents, decode_tensors, encode_agents
from evorl.types import INITIAL, Agent, UserError


@dataclass(frozen=True)
class RestoredRun:
    """The contents of a checkpoint, the same on all ranks; `elite` is an encoded file of one agent, or empty."""

    progress: Progress
    agents: list[Agent]
    elite: bytes


@dataclass(frozen=True)
class Recovery:
    """Finds the checkpoint to resume from, collectively on all ranks, and restores its contents.

    `environments` are those whose episodes continue from one generation into the next, or None.
    """

    config: AnyConfig
    placement: Placement
    algorithm: Algorithm
    experience: Experience
    environments: Continued | None
    interim: InterimCheckpoints
    host: HostDirectory
    warn_once: WarnOnce

    @property
    def checkpoints(self) -> Checkpoints:
        return self.host.directory.checkpoints

    def restore(self) -> RestoredRun | None:
        """Restore the newest checkpoint that is intact on all hosts; None if training starts from the beginning.

        The directory is rolled back to that checkpoint. Raises UserError if there are checkpoints but none is intact;
        the directory is then unchanged.
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
                going_on = not shortened and self.interim.find(generation, restored.agents)
                missing = 0 if going_on else self._load_replay(generation, restored.progress)
                lost = [] if going_on else self._load_environments(generation, restored.progress)
                if shortened:
                    lost.append(f"generation {generation} was cut short, and the checkpoint before it is gone")
                known = self.interim.progress if going_on else None
                self._warn_where_inexact(known or restored.progress, missing, lost)
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

    def restore_first(self, agents: Sequence[Agent]) -> None:
        """Find the interim checkpoint of the first generation, which begins with `agents`, if there is one."""
        if self.interim.find(0, agents) and self.interim.progress is not None:
            self._warn_where_inexact(self.interim.progress, 0, ())

    def _is_too_short(self, progress: Progress) -> bool:
        """Return True if the last generation was cut short by a smaller `training.max_steps` than the current one."""
        limit = progress.shortened_by
        return limit is not None and self.config.training.max_steps > limit and not progress.is_solved(self.config)

    def _announce(self, again: int) -> str:
        """Announce the generation to be trained `again`, if not 0; return the prefix for checkpoints set aside."""
        if again and self.placement.ranks.is_main:
            aside = self.checkpoints.path(again).name
            say(
                f"generation {again} was cut short by training.max_steps: it is trained again with all its steps, as "
                f"if the run had had them from the start; what it came to is in checkpoints/shortened-{aside}"
            )
        return "shortened" if again else "damaged"

    def _listed(self) -> bytes:
        """Return the generations with checkpoints, as JSON. Raises UserError if a trained run has lost them all."""
        directory, generations = self.host.directory, self.checkpoints.generations()
        if not generations and any(row["generation"] > 1 for row in directory.metrics.rows()):
            raise UserError(
                f"run.resume: {directory.path} has been trained before, but has no checkpoint; it was left as it is, "
                "and with another run.name training begins anew"
            )
        return json_bytes(generations)

    def _problem(self, generation: int) -> str:
        """Return why this host cannot resume from a generation, or "". A host without any checkpoints is new."""
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
        """Load and validate the main process's files of a checkpoint, on all ranks. Raises UserError."""
        ranks, where = self.placement.ranks, self.checkpoints.path(generation)
        size = self.config.population.size
        state = ranks.from_main(lambda: self._read_state(generation), "the run's state")
        progress = progress_of(state, str(where))
        agents = ranks.from_main(lambda: self._read_agents(progress, AGENTS, size), "the checkpoint's agents")
        elite = ranks.from_main(lambda: self._read_elite(progress), "the checkpoint's elite")
        return RestoredRun(progress, decode_agents(agents, str(where)), elite)

    def _read_state(self, generation: int) -> bytes:
        """Return the contents of `state.json`. Raises UserError if it belongs to another generation."""
        payload, path = self.checkpoints.read(generation, STATE), self.checkpoints.path(generation) / STATE
        if progress_of(payload, str(path)).generation != generation:
            raise UserError(f"{path}: is of another generation")
        return payload

    def _read_elite(self, progress: Progress) -> bytes:
        """Return the contents of the elite's file, empty if there was no elite yet. Raises UserError."""
        return self._read_agents(progress, ELITE, 1) if ELITE in self.checkpoints.files(progress.generation) else b""

    def _read_agents(self, progress: Progress, name: str, count: int) -> bytes:
        """Return the contents of a file of `count` agents. Raises UserError if the number differs, or the agents fit
        neither the algorithm nor the progress.
        """
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
        """Restore every rank's part of the replay; return the number of missing parts. Raises UserError."""
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
        """Restore the running episodes of every rank; describe those that cannot continue. Raises UserError."""
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
        """Warn if the resume is not bit-exact, with the reasons."""
        reasons = [*progress.changes_of_setup(self.config, self.placement), *lost]
        if self.config.actors is not None and not self.config.actors.lockstep:
            reasons.append("actors run freely")
        if not progress.replay:
            reasons.append("the replay was too large to be kept")
        if missing:
            reasons.append(f"{missing} parts of the replay are not on these hosts")
        if reasons and self.placement.ranks.is_main:
            self.warn_once("exact", f"this resume is not bit-exact: {', '.join(reasons)}")


def first_agents(config: AnyConfig, algorithm: Algorithm, ranks: Ranks) -> list[Agent]:
    """Return the initial population on all ranks: new agents, or those of the run `population.from`.

    Raises UserError on all ranks if that run has no agents that the algorithm can train.
    """
    source = config.population.from_
    if source is None:
        return initial_population(config, algorithm)
    payload = ranks.from_main(lambda: encode_agents(_trained(config, algorithm, source)), "the agents of another run")
    return decode_agents(payload, str(source))


def _trained(config: AnyConfig, algorithm: Algorithm, run: Path) -> list[Agent]:
    """Return agents of a run as an initial population: in order, repeated cyclically if there are too few.

    They keep their weights, optimiser states, hyperparameters and counters, such as the exploration's.
    """
    where = f"population.from: {run}"
    try:
        found = _elite(run) if config.population.from_agents == "elite" else _newest(run)
    except UserError as error:
        raise UserError(f"population.from: {error}") from error
    check_agents(found, algorithm, where)
    agents = []
    for id in range(config.population.size):
        origin = found[id % len(found)]
        own = {name: value for name, value in origin.hyperparameters.items() if not name.startswith(ENVIRONMENT)}
        agent = replace(origin.child(id), parent=None, fault=None)
        agent.hyperparameters = own | config.first_environment_hyperparameters()
        agent.mutation = replace(INITIAL, target=f"agent {origin.id} of {run.name}")
        agents.append(agent)
    return agents


def _elite(run: Path) -> list[Agent]:
    return [load_elite(run)[1]]


def _newest(run: Path) -> list[Agent]:
    """Return the agents of a run's newest readable checkpoint. Raises UserError if there is none."""
    refuse_links_within(run)
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    problem = "there is none"
    for generation in reversed(checkpoints.generations()):
        try:
            return decode_agents(checkpoints.read(generation, AGENTS), str(checkpoints.path(generation) / AGENTS))
        except UserError as error:
            problem = str(error)
    raise UserError(f"{run}: no checkpoint can be read: {problem}")


def gather_agents(learner: Learner, placement: Placement) -> tuple[list[Agent], list[int]]:
    """Return all trained agents, the same on every rank, and the ranks whose replicas differed from rank 0.

    If replicas have drifted apart, every rank takes the agents of rank 0.
    """
    ranks, payload = placement.ranks, encode_agents(learner.to_agents())
    if placement.is_sharded:
        parts = ranks.gather_bytes(payload, "the other ranks' trained agents")
        return [agent for part in parts for agent in decode_agents(part, "another rank's agents")], []
    drifted = ranks.differing(digest(payload), "trained agents")
    if not drifted:
        return learner.policy.agents, []
    return decode_agents(ranks.broadcast_bytes(payload, "rank 0's agents"), "rank 0's agents"), drifted


def drift_warning(peers: Sequence[Peer], drifted: Sequence[int], generation: int) -> str:
    """Format the warning for ranks whose replicas differ from rank 0."""
    others = sorted({peers[rank].cpu for rank in drifted} - {peers[0].cpu})
    cause = (
        f"{', '.join(others)} rounds otherwise than {peers[0].cpu}" if others else "although their CPUs are of a kind"
    )
    ranks = f"rank {', '.join(map(str, drifted))}"
    return f"{ranks} trained other agents than rank 0 in generation {generation} ({cause}); those of rank 0 are taken"
