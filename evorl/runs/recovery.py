"""Checkpoints of a run after each generation, over all ranks and hosts, and its resumption from them."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evorl.algorithms import Algorithm, Experience
from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.envs.horizon import horizon
from evorl.population import check_agents
from evorl.runs.checkpoint import Checkpoints, Files
from evorl.runs.directory import Owner, RunDirectory
from evorl.runs.elite import Elite, Number
from evorl.system.files import Lock, digest, json_bytes, make_directory, read_owner, reason
from evorl.system.formats import decode_agents, decode_tensors, encode_tensors
from evorl.system.provenance import made_with
from evorl.types import Agent, EvorlWarning, UserError


@dataclass
class Progress:
    """The progress of a run, as its checkpoint holds it. `replay` says whether that holds all parts of the replay."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    generation: Number = 0
    agent_steps: Number = 0
    global_steps: Number = 0
    next_id: Number = 0
    elite: Elite = field(default_factory=Elite)
    solved: bool = False
    wall_clock_seconds: float = 0.0
    ranks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    placement: str = "replicated"
    vectorization: str | None = None
    replay: bool = True
    drifts: Number = 0
    """Generations after which ranks that should have held the same agents did not, and took those of rank 0."""
    made_with: dict[str, str] = field(default_factory=dict)


PROGRESS = TypeAdapter(Progress)


@dataclass(frozen=True)
class RestoredRun:
    """The contents of a checkpoint, the same on all ranks; `elite` is a file of one agent."""

    progress: Progress
    agents: list[Agent]
    elite: bytes


class CheckpointManager:
    """Writes the checkpoints of a run and finds the one to go on from, together with all ranks.

    Ranks that see the main process's directory write into it; every other host keeps its own ranks' parts of the replay
    in a directory of its own.
    """

    def __init__(self, config: AnyConfig, placement: Placement, algorithm: Algorithm, experience: Experience) -> None:
        """Claim the run's directory. Raises UserError, on all ranks, where it cannot be used."""
        self._config = config
        self._placement = placement
        self._ranks = placement.ranks
        self._algorithm = algorithm
        self._experience = experience
        self._carries_over = horizon(config, placement.copies, experience.period).carries_over
        self._said: set[str] = set()
        self._shared = True
        self.directory = self._claim()
        sees = self._ranks.gather(np.array([float(self._shared)]), "who sees the run directory")
        self._sees = sees[:, 0] > 0

    @property
    def checkpoints(self) -> Checkpoints:
        return self.directory.checkpoints

    def save(self, progress: Progress, agents: bytes, elite: bytes) -> str:
        """Gather every rank's files in one place and make them a checkpoint; where a disk fails, say so and go on.

        `agents` and `elite` are files of agents, on the main process. Returns the problem, the same on all ranks, or
        nothing.
        """
        ranks, generation = self._ranks, progress.generation
        rows, numbers = self._experience.state()
        progress.ranks, progress.placement = ranks.size, self._placement.kind
        progress.vectorization = self._config.environment.vectorization
        progress.made_with = made_with(ranks.device)
        progress.replay = self._replay_is_kept(sum(value.nbytes for value in rows.values()))
        files = {_part(ranks.rank): encode_tensors(rows, numbers)} if progress.replay else {}
        if ranks.is_main:
            files |= {"agents.safetensors": agents, "state.json": json_bytes(asdict(progress))}
            files |= {"elite.safetensors": elite} if elite else {}
        mine: dict[str, Any] = {"files": {}, "problem": ""}
        try:
            self.directory.flush()
            mine["files"] = {name: self.checkpoints.write(generation, name, value) for name, value in files.items()}
        except OSError as error:
            mine["problem"] = reason(error, self.directory.path)
        parts = [json.loads(part) for part in ranks.gather_bytes(json_bytes(mine), "the other ranks' checkpoint files")]
        problem = next((part["problem"] for part in parts if part["problem"]), "")
        if not problem and ranks.is_main:
            problem = self._complete(
                progress, [part["files"] for part, sees in zip(parts, self._sees, strict=True) if sees]
            )
        problem = ranks.broadcast_bytes(problem.encode(), "the checkpoint").decode()
        if not problem and self._tidies and not ranks.is_main:
            problem = self._complete(progress, [part["files"] for part in parts[ranks.rank :][: ranks.on_host]])
        if problem:
            self.checkpoints.discard()
            lost = f"generation {generation} has no checkpoint: {problem}; training goes on, but what comes now is lost"
            self.warn_once("checkpoint", f"{lost} if the run ends before a later one succeeds")
        else:
            self.reset_warning("checkpoint")
        return problem

    def restore(self) -> RestoredRun | None:
        """Return what the newest checkpoint holds that is whole on all hosts; None where there has never been one.

        Raises UserError where there are checkpoints and none is whole; nothing has been changed then.
        """
        ranks, checkpoints = self._ranks, self.checkpoints
        generations: list[int] = json.loads(ranks.from_main(self._listed, "the checkpoints"))
        for generation in reversed(generations):
            replies = ranks.gather_bytes(self._problem(generation).encode(), "the other hosts' checkpoints")
            problem = next((reply.decode() for reply in replies if reply), None)
            if problem is None:
                restored = self._take(generation)
                self._rollback(generation, restored.elite)
                return restored
            if ranks.is_main:
                self.warn_once(problem, f"{problem}; looking at the checkpoint before it")
        if generations:
            raise UserError(
                f"run.resume: no checkpoint in {checkpoints.directory} is whole; they were left as they are, and with "
                "another run.name training begins anew",
                reported_elsewhere=not ranks.is_main,
            )
        self._rollback(0, b"")
        return None

    def reload(self, payload: bytes, generation: int) -> list[Agent]:
        """Return the main process's agents: from the checkpoint where that is seen, else from its bytes."""
        ranks, path = self._ranks, self.checkpoints.path(generation) / "agents.safetensors"
        expected = ranks.broadcast_bytes(digest(payload).encode(), "the evolved agents' digest").decode()
        if not ranks.is_main and path.is_file():
            payload = path.read_bytes()
        seen = ranks.gather(np.array([float(digest(payload) == expected)]), "who can see the checkpoint")
        if not seen.all():
            payload = ranks.broadcast_bytes(payload, "the evolved agents")
        return decode_agents(payload, str(path))

    def warn_once(self, about: str, message: str) -> None:
        """Warn, from the process that has met the trouble, if this was not reported yet."""
        if about not in self._said and (self._ranks.is_main or not self._shared):
            self._said.add(about)
            warnings.warn(message, EvorlWarning, stacklevel=3)

    def reset_warning(self, about: str) -> None:
        """Let the next trouble of this kind be reported again."""
        self._said.discard(about)

    @property
    def _tidies(self) -> bool:
        """Return whether this rank is the one that moves and removes what is in its directory."""
        return self._ranks.is_main or (self._ranks.leads_host and not self._shared)

    def _listed(self) -> bytes:
        """Return the generations with checkpoints. Raises UserError where they are gone, and not what they led to."""
        generations = self.checkpoints.generations()
        if not generations and any(row["generation"] > 1 for row in self.directory.metrics.read()):
            raise UserError(
                f"run.resume: {self.directory.path} has been trained before, but has no checkpoint; it was left as it "
                "is, and with another run.name training begins anew"
            )
        return json_bytes(generations)

    def _rollback(self, generation: int, elite: bytes) -> None:
        """Make every host's directory what it was after a generation. Raises UserError, on all ranks."""
        problem = ""
        try:
            if self._tidies:
                self.checkpoints.set_aside(generation + 1)
            if self._ranks.is_main:
                self.directory.cut_back(generation, elite)
        except OSError as error:
            problem = f"run.directory: cannot write to {reason(error, self.directory.path)}"
        except UserError as error:
            problem = str(error)
        self._ranks.raise_if_any_failed(problem, "the hosts' run directories")

    def _claim(self) -> RunDirectory:
        """Agree on the directory; the hosts that do not see the main process's one make and lock their own."""
        keep, wait = self._config.checkpoint.keep, self._config.run.lock_timeout
        claimed: list[RunDirectory] = []
        here = Owner.here(self._ranks.launch)

        def claim() -> bytes:
            claimed.append(RunDirectory.claim(self._config, here))
            return json_bytes({"path": str(claimed[0].path), "owner": here.to_json()})

        reply = json.loads(self._ranks.from_main(claim, "the run directory"))
        path, problem = Path(reply["path"]), ""
        if not self._ranks.is_main:
            self._shared = read_owner(path) == reply["owner"]
            claimed = [RunDirectory(path, keep)]
            if self._tidies:
                try:
                    make_directory(path)
                    lock = Lock(path, wait)
                    lock.sign(here.to_json())
                    claimed = [RunDirectory(path, keep, lock)]
                    claimed[0].checkpoints.discard()
                except OSError as error:
                    problem = f"run.directory: cannot write to {reason(error, path)}"
                except UserError as error:
                    problem = str(error)
        self._ranks.raise_if_any_failed(problem, "the hosts' run directories")
        return claimed[0]

    def _replay_is_kept(self, size: int) -> bool:
        """Return whether all ranks' parts together, of which this one's takes `size` bytes, are within the limit."""
        total = float(self._ranks.gather(np.array([float(size)]), "the sizes of the replay").sum()) / 1e6
        limit = self._config.checkpoint.max_replay_mb
        if total > limit:
            what = f"the replay takes {total:.0f} MB, more than checkpoint.max_replay_mb {limit:g}, and is not kept"
            self.warn_once("replay", f"{what}; a resumed run will not be bit-exact")
        return total <= limit

    def _complete(self, progress: Progress, parts: Sequence[Files]) -> str:
        """Make a checkpoint of the gathered files; gives what went wrong."""
        files = {name: listed for part in parts for name, listed in part.items()}
        try:
            self.checkpoints.complete(progress.generation, files, progress.elite.generation)
        except OSError as error:
            return reason(error, self.directory.path)
        return ""

    def _problem(self, generation: int) -> str:
        """Return why this host cannot resume from a generation. A host that has no checkpoints at all is new."""
        checkpoints = self.checkpoints
        try:
            if self._ranks.is_main:
                files = checkpoints.verify(generation)
                if not {"agents.safetensors", "state.json"} <= files.keys():
                    return f"{checkpoints.path(generation)}: lacks the agents or state.json"
            elif self._tidies and checkpoints.generations():
                if generation not in checkpoints.generations():
                    return f"{checkpoints.path(generation)}: is not there on {socket.gethostname()}"
                checkpoints.verify(generation)
        except UserError as error:
            return str(error)
        return ""

    def _take(self, generation: int) -> RestoredRun:
        ranks, checkpoints = self._ranks, self.checkpoints
        where = checkpoints.path(generation)

        def state() -> bytes:
            payload = checkpoints.read(generation, "state.json")
            if progress_of(payload, str(where / "state.json")).generation != generation:
                raise UserError(f"{where / 'state.json'}: is of another generation")
            return payload

        def agents(name: str, count: int) -> bytes:
            payload, path = checkpoints.read(generation, name), str(where / name)
            found = decode_agents(payload, path)
            if len(found) != count:
                raise UserError(f"{path}: holds {len(found)} agents, not {count}")
            check_agents(found, self._algorithm, path)
            return payload

        def elite() -> bytes:
            return agents("elite.safetensors", 1) if "elite.safetensors" in checkpoints.files(generation) else b""

        progress = progress_of(ranks.from_main(state, "the run's state"), str(where))
        size = self._config.population.size
        population = ranks.from_main(lambda: agents("agents.safetensors", size), "the checkpoint's agents")
        best = ranks.from_main(elite, "the checkpoint's elite")
        self._take_replay(generation, progress)
        return RestoredRun(progress, decode_agents(population, str(where)), best)

    def _take_replay(self, generation: int, progress: Progress) -> None:
        """Give every rank its part of the replay, and say where the run will not be what it would have been."""
        ranks, checkpoints = self._ranks, self.checkpoints
        parts = [_part(rank) for rank in range(progress.ranks)] if progress.replay else []
        missing, problem = 0, ""
        for name in parts[ranks.rank :: ranks.size]:
            path = checkpoints.path(generation) / name
            if not path.is_file():
                missing += 1
                continue
            try:
                rows, numbers = decode_tensors(checkpoints.read(generation, name), "the replay")
                self._experience.restore(rows, numbers)
            except UserError as error:
                problem = f"{path}: {error}"
        ranks.raise_if_any_failed(problem, "the replay")
        missing = int(ranks.gather(np.array([float(missing)]), "the parts of the replay").sum())
        here, before, now = self._placement.kind, progress.vectorization, self._config.environment.vectorization
        reasons = {
            f"the number of ranks changed from {progress.ranks} to {ranks.size}": progress.ranks != ranks.size,
            f"the placement changed from {progress.placement} to {here}": progress.placement != here,
            f"environment.vectorization changed from {before} to {now}": before not in (None, now),
            "episodes run on over the ends of generations": self._carries_over,
            "the replay was too large to be kept": not progress.replay,
            f"{missing} parts of the replay are not on these hosts": missing > 0,
        }
        here_with = made_with(ranks.device)
        for name, value in progress.made_with.items():
            reasons[f"{name} changed from {value} to {here_with.get(name)}"] = value != here_with.get(name)
        if ranks.is_main and any(reasons.values()):
            named = ", ".join(reason for reason, holds in reasons.items() if holds)
            self.warn_once("exact", f"this resume is not bit-exact: {named}")


def _part(rank: int) -> str:
    return f"replay-rank-{rank:03d}.safetensors"


def progress_of(payload: bytes, where: str) -> Progress:
    """Return the progress in a checkpoint's `state.json`; errors say `where` it is. Raises UserError."""
    try:
        return PROGRESS.validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
