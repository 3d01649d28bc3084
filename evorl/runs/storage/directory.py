"""The directory of a run: ownership and locking, checkpoints, and histories that a resume cuts back.

A checkpoint is a directory that is created atomically by a rename and validated before use.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evorl.config import AnyConfig, read_yaml, validate
from evorl.config.fields import BENCHMARK, leaves
from evorl.config.run import LeagueSettings
from evorl.config.yaml import parse_settings
from evorl.runs.storage.checkpoint_files import INTERIM, Checkpoints
from evorl.runs.storage.json_lines import JsonLines
from evorl.runs.storage.trust import is_run, note_trained
from evorl.system.files import (
    CHECKPOINTS,
    LOCK,
    Lock,
    file_errors,
    identity,
    json_bytes,
    make_directory,
    make_subdirectory,
    read_bytes,
    read_object,
    reason,
    refuse_links_within,
    remove,
    write_atomically,
    write_json,
)
from evorl.types.agents import Agent
from evorl.types.outcomes import FINISHED, STOPPED, RunFailed, UserError

if TYPE_CHECKING:
    from evorl.distributed import Launch, Ranks

CONFIG, METRICS, LINEAGE = "config.yaml", "metrics.jsonl", "lineage.jsonl"


def check_run(run: Path) -> None:
    """Raise UserError if a directory holds no run, or links, pipes or devices (`refuse_links_within`)."""
    with file_errors(run):
        if not (run / CONFIG).is_file():
            usual = Path("runs") / run
            hint = f"; did you mean {usual}?" if (usual / CONFIG).is_file() else ""
            raise UserError(f"{run}: there is no run here (no {CONFIG}){hint}")
        refuse_links_within(run)


def saved_settings(run: Path) -> dict[str, Any]:
    """A run's configuration as written, not yet validated. Raises UserError like `check_run`."""
    check_run(run)
    return read_yaml(run / CONFIG)


def from_here(run: str | Path) -> str:
    """A run's directory as it is printed: relative to the working directory if it lies below."""
    path = Path(run)
    below = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if below else run)


ELITE_AGENT, ELITE_FACTS = "elite/agent.safetensors", "elite/agent.json"
"""The files with the best agent so far, and with what describes it."""
SUMMARY = "summary.json"
"""The file that says how the run ended."""
EXPORTED = "agent.onnx"
"""The file with the exported agent, by `evorl export`."""
INTERFACE = "environment.json"
"""The file that describes the observation and action spaces."""
FILES_OF_RUN = (CONFIG, METRICS, LINEAGE, SUMMARY, INTERFACE, ELITE_AGENT, ELITE_FACTS, "tracking.json")
"""The files of a run outside its checkpoints."""
FREE_TO_CHANGE = (
    "run.",
    "training.",
    "tracking.",
    "checkpoint.",
    "population.placement",
    "population.hyperparameters",
    "environment.vectorization",
    "evaluation.max_steps",
    "network.bf16",
)
"""Settings, or prefixes of settings, that may change on resume."""
FREE_IN_A_BRANCH = (
    *FREE_TO_CHANGE,
    "seed",
    "actors.",
    "evaluation.",
    "evolution.",
    "league.archive",
    *(
        f"algorithm.{name}"
        for name in (
            "reward_clip", "split_batches", "adam_epsilon", "annealing", "rollout_steps", "normalize_advantage",
            "normalize_rewards", "entropy_scales", "grad_sync_steps", "double", "policy_delay", "exploration.",
        )
    ),
)  # fmt: skip
"""Settings, or prefixes of settings, that may change in a branch, together with the algorithm's hyperparameters."""
FIXED_IN_A_BRANCH = (
    "evolution.fitness",
    "evolution.initial",
    "algorithm.exploration.noise",
    "algorithm.exploration.start",
)
"""Exceptions: the elite's score is a fitness, and agents are past the start."""
BUILT_IN = ("algorithm.", "network.", "population.from", "evolution.initial")
"""Settings, or prefixes of settings, by which agents are made: those of a run do not go on with others."""
NOT_SET = "not set"
"""Shown for a setting that one of two configurations lacks."""
CANNOT_WRITE = "run.directory: cannot write to "
LOCK_PATIENCE = 10.0
"""Seconds to wait for another process that still uses a run's directory."""


def owner_of(launch: Launch) -> dict[str, Any]:
    """The owner of a run's directory, as its lock names it: this process, its launch, and the number of ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {"host": socket.gethostname(), "pid": os.getpid(), "launch": launch.name, "ranks": ranks}


def has_used(launch: Launch, directory: Path) -> bool:
    """True if an earlier attempt of the same, restarted launch used the directory."""
    return launch.restarted and read_object(directory / LOCK).get("launch") == launch.name


class RunDirectory:
    """The directory `runs/NAME/`, which all ranks see; docs/recipes.md lists its files.

    Every rank writes its own files of a checkpoint; only the main process writes, moves and removes anything else.
    """

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / CHECKPOINTS)
        self.interim = Checkpoints(path / CHECKPOINTS, stem=INTERIM)
        self.metrics = JsonLines(path / METRICS)
        self.lineage = JsonLines(path / LINEAGE)
        self._lock = lock
        self._locked = identity(path / LOCK)

    @classmethod
    def claim(cls, config: AnyConfig, launch: Launch) -> RunDirectory:
        """Claim the run's directory and lock it until the run ends. Raises UserError if it belongs to another run."""
        with file_errors(config.run.directory, CANNOT_WRITE):
            path = _directory(config, launch)
            make_directory(path)
            lock = Lock(path, LOCK_PATIENCE)
        run = cls(path, lock)
        try:
            with file_errors(path, CANNOT_WRITE):
                run._take_over(config, has_used(launch, path))
                # Sign last: a launcher's next attempt must not take over a directory that refused this one.
                lock.sign(owner_of(launch))
        except BaseException:
            run.release()
            raise
        return run

    @classmethod
    def open(cls, config: AnyConfig, ranks: Ranks) -> RunDirectory:
        """Claim the run's directory on the main process and open it on the others, collectively.

        Raises UserError on all ranks if it belongs to another run, or if a rank does not see the same directory.
        """
        claimed: list[RunDirectory] = []

        def claim() -> bytes:
            claimed.append(cls.claim(config, ranks.launch))
            return json_bytes({"path": str(claimed[0].path), "owner": owner_of(ranks.launch)})

        reply = json.loads(ranks.from_main(claim, "the run directory"))
        path, problem = Path(reply["path"]), ""
        if read_object(path / LOCK) != reply["owner"]:
            problem = (
                f"run.directory: rank {ranks.rank} on {socket.gethostname()} does not see {path} of rank 0 on "
                f"{reply['owner']['host']}; all hosts need one directory, on a file system that they share"
            )
        try:
            ranks.raise_if_any_failed(problem, "who sees the run directory")
        except BaseException:
            for directory in claimed:
                directory.release()
            raise
        return claimed[0] if claimed else cls(path)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take_over(self, config: AnyConfig, restarted: bool) -> None:
        refuse_links_within(self.path)
        there = {path.name for path in self.path.iterdir()} - {LOCK}
        if there and CONFIG in there:
            if config.run.resume == "never" and not restarted:
                raise UserError(
                    f"run.name: {self.path} already holds a run; choose another name, or go on with run.resume=auto"
                )
            check_same_run(self.path, config)
        elif any(not name.startswith(".") for name in there):
            raise UserError(f"run.name: {self.path} is not empty and holds no run; choose another name")
        self.checkpoints.discard()
        for name in FILES_OF_RUN:  # What killed writers have left; nobody else writes these files now.
            for path in (self.path / name).parent.glob(f".{Path(name).name}.*.partial"):
                remove(path)

    def begin(self, config: AnyConfig, ranks: Ranks, *, finished: bool) -> None:
        """Write the configuration with which training begins or goes on (collective). Raises UserError on all ranks.

        A run that has `finished` and does not go on keeps its summary until it ends again. If a start fails before this
        call, the new run's name stays free; if a resume does, its histories already end with the checkpoint (see
        `roll_back`).
        """

        def write() -> bytes:
            # `run.resume` describes a launch, not the run: with a stored `auto`, `evorl train RUN/config.yaml` would
            # train this run further.
            launched = config.run.model_copy(update={"resume": "never"})
            payload = config.model_copy(update={"run": launched}).to_yaml().encode()
            try:
                parse_settings(payload, CONFIG)
            except UserError as error:
                advice = "the run could not read it again; let the environment read large data from a file"
                raise UserError(f"{error}; {advice}") from error
            with file_errors(self.path, CANNOT_WRITE):
                write_atomically(self.path / CONFIG, payload)
                note_trained(config)
                if not finished:
                    (self.path / SUMMARY).unlink(missing_ok=True)
            return b""

        ranks.from_main(write, "the run's configuration")

    def check(self) -> None:
        """Raise RunFailed if the directory was moved or removed after this run claimed it, or is another run's now.

        Raises OSError if that cannot be seen.
        """
        lock = identity(self.path / LOCK)
        if self._locked is not None and lock != self._locked:
            problem = f"{LOCK} is {'missing' if lock is None else 'that of another run'}"
            raise RunFailed(
                f"{from_here(self.path)}: the directory of this run was moved or removed while it trained ({problem}); "
                "the run ends, and nothing more is written there; `evorl resume` goes on where the directory is now"
            )

    def has_trained(self) -> bool:
        """True if the run has recorded more than the one generation that a kill before its first checkpoint may leave.

        Starting over would lose its elite, too.
        """
        has_finished = read_object(self.path / SUMMARY).get("ended") in (FINISHED, STOPPED)
        went_on = has_finished or any((self.path / CHECKPOINTS).glob(f"*{INTERIM}-*"))
        return any(went_on or row["generation"] > 1 for row in self.metrics.rows())

    def flush(self) -> None:
        """Write pending lines of metrics and lineage to disk. Raises OSError, and RunFailed like `check`."""
        self.check()
        self.metrics.flush()
        self.lineage.flush()

    def write_checkpoint(self, ranks: Ranks, checkpoints: Checkpoints, number: int, files: Mapping[str, bytes]) -> str:
        """Write checkpoint `number` from the `files` of every rank, collectively.

        The generation's lines are flushed first: a checkpoint guarantees that they are on disk. Returns the problem,
        the same on all ranks and empty on success. Raises RunFailed like `check`.
        """
        written: dict[str, Any] = {"files": {}, "problem": ""}
        try:
            self.flush()
            written["files"] = {name: checkpoints.write(number, name, value) for name, value in files.items()}
        except OSError as error:
            written["problem"] = (f"rank {ranks.rank}: " if ranks.size > 1 else "") + reason(error, self.path)
        replies = ranks.gather_bytes(json_bytes(written), "the other ranks' checkpoint files")
        parts = [json.loads(reply) for reply in replies]
        problem = next((part["problem"] for part in parts if part["problem"]), "")
        if not problem and ranks.is_main:
            try:
                checkpoints.complete(number, {name: entry for part in parts for name, entry in part["files"].items()})
            except OSError as error:
                problem = reason(error, self.path)
        problem = ranks.broadcast_bytes(problem.encode(), "the checkpoint").decode()
        if problem and ranks.is_main:
            with contextlib.suppress(OSError):
                self.check()  # Another run's partial checkpoint is left alone.
                checkpoints.discard()
        return problem

    def cut_back(self, generation: int, elite: bytes) -> None:
        """Roll metrics, lineage and elite back to the end of `generation`; `elite` is empty if there was none."""
        self.metrics.cut_back(generation)
        self.lineage.cut_back(generation)
        if elite:
            self.write_elite(elite)
        else:
            remove((self.path / ELITE_AGENT).parent)

    def write_elite(self, payload: bytes) -> None:
        """Write the best agent so far, encoded as a file of one agent, to `elite/`."""
        from evorl.system.formats import decode_agents

        file, facts = self.path / ELITE_AGENT, self.path / ELITE_FACTS
        agent = decode_agents(payload, str(file.parent))[0]
        described = json_bytes(agent.describe())
        # Unchanged files are not rewritten: a push compares their time with the exported agent's.
        with contextlib.suppress(OSError):
            if (read_bytes(file), read_bytes(facts)) == (payload, described):
                return
        self.check()
        make_subdirectory(file.parent)
        write_atomically(file, payload)
        write_atomically(facts, described)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file of JSON, such as `summary.json`. Raises OSError, and RunFailed like `check`."""
        self.check()
        write_json(self.path / name, value)


def load_elite(path: Path) -> tuple[dict[str, Any], Agent]:
    """The configuration and the elite of the run in directory `path`. Raises UserError if it has none yet."""
    from evorl.system.formats import decode_agents

    config = saved_settings(path)
    file = path / ELITE_AGENT
    with file_errors(file):
        if not file.is_file():
            raise UserError(f"{path}: the run has no elite yet; its first generation has not ended")
        payload = read_bytes(file)
    agents = decode_agents(payload, str(file))
    if len(agents) != 1:
        raise UserError(f"{file}: holds {len(agents)} agents; an elite is one")
    return config, agents[0]


def check_same_run(path: Path, config: AnyConfig) -> None:
    """Raise UserError if `config` differs from that of the run in `path` in a setting that may not change on resume."""
    for key, was, now in differences(validate(read_yaml(path / CONFIG)), config):
        is_fixed = key in config.algorithm.frozen_on_resume or not key.startswith(FREE_TO_CHANGE)
        if is_fixed and not is_other_run(key, was, now):
            raise UserError(
                f"run.resume: {path} was started with another configuration: {key} was {was} and is now {now}; "
                f"{way_to_change(path, key, now, config)}"
            )


def is_other_run(key: str, was: Any, now: Any) -> bool:
    """True if the benchmark was a run and still is one.

    Its path may change, since it may have been moved; the elite is measured again if its best agent differs.
    """
    return key == BENCHMARK and is_run(was) and is_run(now)


def may_change_in_branch(key: str, config: AnyConfig) -> bool:
    """True if the agents of a checkpoint can go on with another value of this setting."""
    is_hyperparameter = key.removeprefix("algorithm.") in config.algorithm.hyperparameters
    # The importance exponent counts the steps of past generations by the length of this one, in whole messages.
    if key in ("evolution.steps", "algorithm.rollout_steps") and config.replay.prioritised is not None:
        return False
    # A replay holds rewards as they were clipped when they were stored.
    if key == "algorithm.reward_clip" and config.algorithm.replayed:
        return False
    return not key.startswith(FIXED_IN_A_BRANCH) and (is_hyperparameter or key.startswith(FREE_IN_A_BRANCH))


def way_to_change(run: Path, key: str, value: Any, config: AnyConfig) -> str:
    """Advice for a change that a resumed run refuses: the command for a new run, with this run's agents if any fit.

    `config` has the new `value` of `key`. For `NOT_SET`, which no command can give, the advice names none.
    """
    if value == NOT_SET:
        return "only a new run can leave it out"
    where, changed = shlex.quote(from_here(run)), shlex.quote(f"{key}={json.dumps(value)}")
    has_agents = (run / ELITE_AGENT).is_file()
    if has_agents and may_change_in_branch(key, config):
        return f"`evorl branch {where} NEW {changed}` goes on with it in a new run"
    agents, which = f" population.from={where}", " from its best agent"
    if key.startswith(BUILT_IN) or not has_agents:
        agents = which = ""
    elif key == "environment.id":
        which += ", if the spaces are the same (otherwise leave population.from out)"
    return f"`evorl train {where}/{CONFIG} {changed}{agents} --name NEW` begins a new run with it{which}"


def _directory(config: AnyConfig, launch: Launch) -> Path:
    """The run's directory: by name, else that of an earlier attempt of this launch, else a new one."""
    directory, name = config.run.directory, config.run.name
    if name:
        path = directory / name
        for outer in path.parents:
            if outer != directory and outer.is_relative_to(directory) and (outer / CONFIG).is_file():
                raise UserError(f"run.name: {path} would lie in the directory of the run {outer}; choose another name")
        return path
    if config.run.resume == "auto":
        raise UserError("run.name: resuming needs the name of the run to resume")
    earlier = [path for path in directory.glob("*") if has_used(launch, path)] if launch.restarted else []
    if earlier:
        return max(earlier, key=lambda path: (path / LOCK).stat().st_mtime)
    environment = config.environment.id.split(":")[-1].replace("/", "-")
    stem = f"{config.algorithm.name}-{environment}-{time.strftime('%Y%m%d-%H%M%S')}"
    make_directory(directory)
    for number in itertools.count(1):
        path = directory / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            make_directory(path, fresh=True)
            return path
    raise AssertionError("itertools.count ended")


def differences(old: AnyConfig, new: AnyConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, old value, new value) of each setting that differs, by key."""
    league = LeagueSettings()  # A game without this section is played by its defaults.
    before, after = (
        leaves(config.model_copy(update={"league": config.league or league}).model_dump(mode="json"))
        for config in (old, new)
    )
    keys = before.keys() | after.keys()
    sections = {key[:place] for key in keys for place, letter in enumerate(key) if letter == "."}
    for key in sorted(keys):
        was, now = (values.get(key, NOT_SET) for values in (before, after))
        if key in sections and all(value in (None, {}, NOT_SET) for value in (was, now)):
            continue  # A section that one of them lacks differs in its settings, which say more.
        # NaN differs from itself.
        if was != now and (type(was) is not type(now) or str(was) != str(now)):
            yield key, was, now
