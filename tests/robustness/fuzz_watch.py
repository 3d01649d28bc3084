"""What a process that looks at somebody's run may not do: noted as it happens."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("mkdir", "remove", "rename", "rmdir", "symlink", "link", "truncate", "chmod", "chown", "utime", "mkfifo")
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile")
GIT = ["git", "rev-parse", "--show-toplevel"]
"""What W&B asks about the working directory, which reads its settings and runs nothing of it."""
GLFW = "def get_version(library_handle)"
"""Part of the program by which glfw, which MuJoCo imports, asks libraries for their versions."""
ASKS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
CANARY = "canary-"
ERROR = re.compile(r"(evorl[ a-z]*: )?error: ")
TRACEBACK = "a traceback"
"""How a problem begins that is one."""
LONGEST = 20_200
"""Letters of an error message."""
SHARED = "/dev/shm/pym-"
"""Memory of the environments' processes."""


@dataclass(frozen=True)
class Limits:
    """What a command may use before it has ended or training begins."""

    seconds: float = 5.0
    megabytes: float = 500.0


@dataclass(frozen=True)
class Outcome:
    """How a case ended; without an exit code it had to be killed."""

    code: int | None
    seconds: float
    megabytes: float
    stdout: str = ""
    stderr: str = ""
    problems: Sequence[str] = field(default=())


class Watch:
    """Notes from Python's audit events what would leave the run, and refuses it."""

    def __init__(self, allowed: Sequence[Path]) -> None:
        self.problems: list[str] = []
        self._allowed = [os.path.realpath(path) for path in allowed]
        self._allowed += ["/dev/null", "/dev/tty"]
        self._busy = False

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            self._note(event, given)
        finally:
            self._busy = False

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[0], str | bytes) and isinstance(given[2], int) and given[2] & WRITES:
            self._written(event, given[0], -1)
        elif event.startswith("os.") and event[3:] in CHANGES:
            # After the paths come numbers, the last of which is the directory that a relative path begins at.
            paths = [part for part in given if isinstance(part, str | bytes | os.PathLike)]
            descriptor = given[-1] if isinstance(given[-1], int) else -1
            # What a link says is no place that is written to.
            for path in paths[1:] if event == "os.symlink" else paths:
                self._written(event, path, descriptor if event in ("os.remove", "os.rmdir") else -1)
        elif event in STARTS and str(given[1:2]) != str((GIT,)) and GLFW not in str(given):
            self._refuse(f"starts a program: {event} {str(given)[:200]}")
        elif event in ASKS:
            self._refuse(f"asks the network: {event} {str(given)[:200]}")
        elif event in ("socket.connect", "socket.sendto") and isinstance(given[1], tuple):
            self._refuse(f"asks the network: {event} {str(given[1])[:200]}")

    def _written(self, event: str, path: str | bytes | os.PathLike[Any], descriptor: int) -> None:
        name = Path(os.fsdecode(path))
        # What has a NUL is opened nowhere, and what the run's own code leaves behind is looked for in the end.
        if "\0" in str(name) or name.name.startswith(CANARY):
            return
        if descriptor >= 0 and not name.is_absolute():
            name = Path(f"/proc/self/fd/{descriptor}") / name
        # Only opening follows a link in the last place.
        real = os.path.realpath(name if event == "open" else name.parent)
        real = real if event == "open" else f"{real}/{name.name}"
        inside = any(real == place or real.startswith(f"{place}/") for place in self._allowed)
        if not inside and not real.startswith(SHARED):
            self._refuse(f"writes outside the run: {event} {real[:200]!r}")

    def _refuse(self, problem: str) -> NoReturn:
        self.problems.append(problem)
        raise PermissionError(problem)


def unsafe(command: Sequence[str]) -> str:
    """Why a command imports modules from the working directory; "" where it does not."""
    flags = list(itertools.takewhile(lambda argument: argument.startswith("-"), command[1:]))
    before = flags[: flags.index("-m")] if "-m" in flags else ["-P"]
    safe = os.environ.get("PYTHONSAFEPATH") or {"-P", "-I"} & set(before)
    return "" if safe else f"starts python {' '.join(command[1:3])} without -P, in the working directory"


def complaints(outcome: Outcome, limits: Limits, goes_on: bool) -> list[str]:
    """What of a command's end is not as it should be; one that goes on says more than a line."""
    if outcome.code is None:
        return []
    lines = [line for line in re.split(r"[\r\n]", outcome.stderr) if line]
    errors = [line for line in lines if ERROR.match(line)]
    usage = outcome.stderr.startswith("usage: ")
    found = []
    if "Traceback (most recent call last)" in outcome.stderr:
        places = re.findall(r'File ".*?/(evorl/\S+)", line (\d+)', outcome.stderr) or [("evorl", "?")]
        found.append(f"{TRACEBACK} from {':'.join(places[-1])}: {lines[-1][:200]}")
    elif outcome.code not in (0, 2):
        found.append(f"exit code {outcome.code}")
    elif len(errors) != (outcome.code == 2):
        found.append(f"exit code {outcome.code} with {len(errors)} lines of error")
    elif outcome.code == 2 and len(lines) != 1 and not usage and not goes_on:
        found.append(f"{len(lines)} lines where one was due: {lines[0][:200]!r}")
    if any(not line.isprintable() for line in (*lines, *outcome.stdout.split("\n"))):
        found.append("letters on the terminal that cannot be printed")
    if warned := re.search(r"\w+Warning: .*", outcome.stderr):
        found.append(f"a warning of Python's: {warned[0][:200]}")
    if any(len(line) >= LONGEST for line in errors):
        found.append(f"an error of {max(map(len, errors))} letters")
    if outcome.seconds > limits.seconds:
        found.append(f"took {outcome.seconds:.1f} s")
    if outcome.megabytes > limits.megabytes:
        found.append(f"took {outcome.megabytes:.0f} MB")
    return found
