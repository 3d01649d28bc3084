"""Rooms in which hostile inputs are tried: a copy of a run, and a forked child that watches what it does itself."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import corruption
import torch
import yaml
from fuzz_watch import CANARY, Limits, Outcome, Watch, complaints, unsafe
from wandb.sdk.lib.urls import DEFAULT_BASE_URL
from wandb.sdk.wandb_init import _WandbInit
from wandb.sdk.wandb_setup import _WandbSetup

from evorl import __main__ as cli
from evorl.algorithms import SETTINGS
from evorl.commands import evaluate
from evorl.config import read_yaml, validate
from evorl.export import hub
from evorl.runs import run as training
from evorl.runs.program import run_program
from evorl.runs.train import ONLINE

RUN, BESIDE = "{run}", "{beside}"
"""Stand in the arguments of a case for the run's directory and for that of a whole run beside it."""
PREPARING = 60.0
PARENTS_END = 1
"""What prctl calls the signal that a process gets when its parent ends."""
CAPABILITIES, OVERRIDING = 0x20080522, 0b1110
"""The version of the call, and the rights to read, write, search and change what modes forbid."""
PRIORITISED = "replay.prioritised={exponent: 0.6}"
"""Of all replays this one keeps the most in its files."""
MODULES = (
    "yaml", "ale_py", "evilmod", "sitecustomize", "usercustomize", "mujoco", "mujoco_py", "cv2", "jax", "moviepy",
    "shimmy", "torch", "numpy", "json", "accelerate", "wandb", "gymnasium", "online", "conftest", "__main__",
)  # fmt: skip
EVIL = """import os
os.close(os.open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "canary-{name}"), os.O_CREAT))
def make(*given, **named):
    os.close(os.open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "canary-call"), os.O_CREAT))
class Thing:
    __init__ = make
"""


@dataclass(frozen=True)
class Room:
    """A directory with a run that may be spoiled, and something outside it that may not."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "runs" / "a"

    @property
    def outside(self) -> Path:
        return self.path / "outside"

    def put(self, name: str, payload: bytes) -> None:
        """Write a file of the run."""
        file = self.run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(payload)


def nothing(room: Room) -> None:
    """Leave the run as it is."""


@dataclass(frozen=True)
class Case:
    """A command line, and what is done to the run before.

    `inside` makes the run's directory the working directory, `goes_on` lets a resumed run get as far as its first step,
    and `unprivileged` takes away the superuser's right to look into every directory. `beside` puts a whole run next to
    it. A `call` is given the run's directory instead of a command line. `says` is a pattern that stdout must match.
    """

    family: str
    arguments: Sequence[str]
    prepare: Callable[[Room], None] = nothing
    inside: bool = False
    goes_on: bool = False
    unprivileged: bool = False
    beside: bool = False
    call: Callable[[Path], None] | None = None
    says: str = ""


class Executed(BaseException):
    """Stands for the program that `evorl resume` becomes."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__()
        self.command = list(command)


class Began(BaseException):
    """Stands for the training that would begin."""


def online() -> ModuleType:
    """The program that `evorl resume` starts."""
    spec = importlib.util.spec_from_file_location("evorl_demo_online", ONLINE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forked(work: Callable[[], None]) -> int:
    """Start a process of its own group that does `work` and ends; gives its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PARENTS_END, signal.SIGKILL)  # It may hang, and would outlive a fuzzer that is killed.
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def workshop(warm: Callable[[Path, Path], None] | None = None) -> Iterator[Bench]:
    """A place to try cases in, with a small run that was trained there; all of it is removed in the end.

    `warm` is given the run and a folder before children are forked, to do what a process does once.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="evorl-fuzz-") as name:
        place = Path(name)
        place.chmod(0o755)

        def train() -> None:
            os.chdir(place)
            quiet(place / "stdout", place / "stderr")
            code, errors, _ = corruption.train("run.name=a", "training.max_steps=120", "checkpoint.keep=2", PRIORITISED)
            assert code == 0, errors

        if os.waitpid(forked(train), 0)[1]:
            raise RuntimeError((place / "stderr").read_text())
        run = place / "runs" / "a"
        shorten(run / "config.yaml")
        for module in MODULES:
            (run / f"{module}.py").write_text(EVIL.format(name=module))
        # What is imported or worked out once is so before the children are forked.
        evaluate.evaluate_elite(run, 1, 0)
        if warm is not None:
            warm(run, place)
        gc.collect()
        gc.freeze()
        try:
            yield Bench(run, place, online())
        finally:
            gc.unfreeze()


def shorten(path: Path) -> None:
    """Leave out of a configuration what is so anyway: reading it takes most of the time of a command."""
    whole = validate(read_yaml(path), SETTINGS)
    short = whole.model_dump(mode="json", exclude_defaults=True)
    assert validate(short, SETTINGS) == whole
    path.write_text(yaml.safe_dump(short))


def quiet(stdout: Path, stderr: Path) -> None:
    """Send what this process prints, in Python or not, into files."""
    for number, path in ((1, stdout), (2, stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def drop_rights() -> None:
    """Let modes of files mean to the superuser what they mean to others."""
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    sets[0] &= ~OVERRIDING
    libc.capset(header, sets)


def memory(name: str) -> float:
    """Megabytes that the system notes of this process by this name."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


@dataclass(frozen=True)
class Bench:
    """Tries cases on copies of the run `template`."""

    template: Path
    place: Path
    program: ModuleType

    def tried(self, case: Case, limits: Limits | None = None) -> Outcome:
        """How a case ends; one that was too slow is tried again, since another program may have had the cores."""
        limits = limits or Limits()
        outcome = self._tried(case, limits)
        if outcome.seconds > limits.seconds:
            outcome = min(outcome, self._tried(case, limits), key=lambda each: each.seconds)
        return outcome

    def _tried(self, case: Case, limits: Limits) -> Outcome:
        with tempfile.TemporaryDirectory(dir=self.place) as name:
            return self._in_room(case, Room(Path(name)), limits)

    def _in_room(self, case: Case, room: Room, limits: Limits) -> Outcome:
        self._furnish(room, case)
        (room.outside / "thesis").mkdir(parents=True)
        (room.outside / "thesis" / "text").write_text("mine")
        (room.path / "temporary").mkdir()
        for name in ("stdout", "stderr"):
            (room.path / name).touch()
        room.path.chmod(0o755)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        pid = forked(lambda: Child(case, room, self.program, writer).work(limits))
        os.close(writer)
        with contextlib.closing(open(reader, "rb", buffering=0)) as pipe:  # noqa: PTH123
            outcome = _awaited(pid, pipe, limits)
        output = [(room.path / name).read_bytes()[: 2**20].decode(errors="replace") for name in ("stdout", "stderr")]
        outcome = replace(outcome, stdout=output[0], stderr=output[1])
        problems = [*outcome.problems, *complaints(outcome, limits, case.goes_on), *traces(room)]
        if case.says and not problems and (outcome.code or not re.search(case.says, outcome.stdout)):
            problems.append(f"exit code {outcome.code}, and stdout does not match {case.says}")
        return replace(outcome, problems=problems)

    def store(self, case: Case, path: Path) -> None:
        """Leave a case's spoiled run and its command line in a directory, to be looked at."""
        room = Room(path)
        shutil.rmtree(path, ignore_errors=True)
        self._furnish(room, case)
        case.prepare(room)
        (path / "command.txt").write_text(f"evorl {' '.join(map(repr, case.arguments))} {case.call}\n")

    def _furnish(self, room: Room, case: Case) -> None:
        shutil.copytree(self.template, room.run)
        if case.beside:
            shutil.copytree(self.template, room.run.with_name("b"))


def _awaited(pid: int, pipe: Any, limits: Limits) -> Outcome:
    """Wait for a child to be ready, and then for its end, and kill what is left of it."""
    ended = os.pidfd_open(pid)
    told = b""
    try:
        select.select([pipe], [], [], PREPARING)
        began = time.perf_counter()
        in_time = bool(select.select([ended], [], [], limits.seconds + 0.5)[0])
        seconds = time.perf_counter() - began
        told = pipe.read() or b""
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _, _, report = told.partition(b"\n")
    if not in_time:
        return Outcome(None, seconds, 0.0, problems=[f"still runs after {limits.seconds:g} s"])
    if not report:
        return Outcome(status, seconds, 0.0, problems=[f"the process ended with {status}"])
    return Outcome(**json.loads(report))


class Child:
    """The forked process: spoils its run, gives the command line to evorl, and reports what came of it."""

    def __init__(self, case: Case, room: Room, program: ModuleType, writer: int) -> None:
        self._case = case
        self._room = room
        self._program = program
        self._writer = writer
        self._watch = Watch([room.run, room.path / "temporary"])

    def work(self, limits: Limits) -> None:
        """Never raises what the command raises: that is a part of the report."""
        case, room = self._case, self._room
        quiet(room.path / "stdout", room.path / "stderr")
        case.prepare(room)
        os.chdir(room.run if case.inside else room.path)
        self._settle()
        if case.unprivileged:
            drop_rights()
        run = "." if case.inside else "runs/a"
        sys.argv = ["evorl", *(argument.replace(RUN, run).replace(BESIDE, "runs/b") for argument in case.arguments)]
        os.write(self._writer, b"ready\n")
        sys.addaudithook(self._watch)
        before, began = memory("VmRSS"), time.perf_counter()
        faulthandler.dump_traceback_later(limits.seconds, file=sys.stderr)
        code = self._code()
        faulthandler.cancel_dump_traceback_later()
        seconds, megabytes = time.perf_counter() - began, memory("VmHWM") - before
        problems = [*self._watch.problems[:5], *self._searched()]
        report = {"code": code, "seconds": seconds, "megabytes": megabytes, "problems": problems}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.write(self._writer, json.dumps(report).encode())

    def _settle(self) -> None:
        """Make this process what a fresh one would be: its warnings, its places for files, its limits."""
        sys.dont_write_bytecode = True
        tempfile.tempdir = str(self._room.path / "temporary")
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (int((memory("VmSize") + 4096) * 2**20),) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # The peak of memory begins anew.

    def _code(self) -> Any:
        def executed(path: str, command: Sequence[str], environment: object = None) -> NoReturn:
            raise Executed(command)

        def settled(it: Any, settings: Any, *others: Any, **named: Any) -> NoReturn:
            if settings.base_url != DEFAULT_BASE_URL:
                self._watch.problems.append(f"W&B would send the run and the key to {settings.base_url}")
            self._watch.problems += [f"W&B takes {name} from the run" for name in foreign(settings, self._room.run)]
            raise Began

        def steps(it: Any, *others: Any, **named: Any) -> NoReturn:
            raise Began

        with (
            patch.multiple(os, execv=executed, execve=executed, execvp=executed, execvpe=executed),
            # Waiting for the disk would take most of the time, and shows nothing here.
            patch.multiple(os, fsync=lambda descriptor: None),
            patch.object(training.Run, "steps", steps),
            patch.object(_WandbSetup, "ensure_service", lambda it: None),
            patch.object(_WandbInit, "init", settled),
            patch.object(hub, "check_hub", lambda *names: None),
            patch.object(hub, "push", lambda folder, name, private: name),
        ):
            return self._ended(self._command)

    def _ended(self, command: Callable[[], int]) -> Any:
        """The exit code of a command, with a traceback where Python would print one."""
        try:
            return command()
        except Began:
            return 0
        except SystemExit as end:
            return 0 if end.code is None else end.code
        except BaseException:
            traceback.print_exc()
            return 1

    def _command(self) -> int:
        call = self._case.call
        try:
            return cli.main() if call is None else run_program(lambda given: call(self._room.run), [])
        except Executed as done:
            if problem := unsafe(done.command):
                self._watch.problems.append(problem)
            if not self._case.goes_on or done.command[1:2] != [str(ONLINE)]:
                return 0
            return run_program(self._program.main, done.command[2:])

    def _searched(self) -> list[str]:
        """Whether modules would be searched for where the run lies."""
        mine = {os.path.realpath(self._room.run), os.path.realpath(Path.cwd())}
        found = [path for path in sys.path if path in ("", ".") or os.path.realpath(path) in mine]
        return ["the working directory is on sys.path"] if found else []


def foreign(settings: Any, run: Path) -> list[str]:
    """The settings of W&B that are as a file in the run's directory says, which W&B reads where a program stands."""
    lines = [line for path in run.glob("*wandb/settings") for line in path.read_text("latin-1").splitlines()]
    named = [re.split(r"\s*[=:]\s*", line, maxsplit=1) for line in lines if re.match(r"\w+\s*[=:]", line)]
    return sorted({name for name, value in named if str(getattr(settings, name, None)) == value})


def traces(room: Room) -> list[str]:
    """What a command has left behind outside its run."""
    found = [f"code of the run was executed: {path.name}" for path in sorted(room.path.glob(f"{CANARY}*"))]
    there = {path.relative_to(room.outside).as_posix() for path in room.outside.rglob("*")}
    if there != {"thesis", "thesis/text"} or (room.outside / "thesis" / "text").read_text() != "mine":
        found.append("what lies outside the run was changed")
    return found
