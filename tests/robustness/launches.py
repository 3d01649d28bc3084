"""Start the ranks of a run by forking a process that has imported everything, which takes milliseconds.

A stand-in for the launcher is forked first; it keeps the store in which the
ranks meet, forks them, ends all when one has failed, and starts them again as often as it may, as torchrun does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.fx.experimental.symbolic_shapes  # noqa: F401  (the first backward pass imports it, in a second)
from timeline import Timeline, train
from torch._C._distributed_c10d import TCPStore

GRACE = 30.0
"""Seconds that torchrun gives ranks to end at SIGTERM before it kills them."""
DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
Main = Callable[[Sequence[str]], object]


class Process(Protocol):
    """A process that this one has started."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code once it has ended, negative for a signal."""
        ...


class Forked:
    """A copy of this process that calls a function, whose result is the exit code."""

    def __init__(self, function: Callable[[], int], dies_with_parent: bool = False) -> None:
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not be forked"
        parent = os.getpid()
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid == 0:
            code = 1
            try:
                if dies_with_parent:
                    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
                code = function() if not dies_with_parent or os.getppid() == parent else 1
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class Handle:
    """A process by its descriptor, so that a later one with its number is never meant."""

    def __init__(self, pid: int) -> None:
        """Find the process. Raises ProcessLookupError where it is gone."""
        self._descriptor = os.pidfd_open(pid)

    def ended(self, seconds: float = 0.0) -> bool:
        """Return whether it ends in time, also where its parent has not asked how."""
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def kill(self, name: str = "SIGKILL") -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.Signals[name])

    def close(self) -> None:
        os.close(self._descriptor)


def fork_launch(
    main: Main, directory: Path, log: Path, timeline: Timeline, settings: Sequence[str], ranks: int, restarts: int
) -> Process:
    """Fork the launcher's stand-in, or for one rank the rank itself."""

    def one() -> int:
        return train(main, timeline, settings)

    def several() -> int:
        return _stand_in(one, ranks, restarts)

    return fork_logged(one if ranks == 1 else several, directory, log)


def fork_logged(function: Callable[[], int], directory: Path, log: Path) -> Process:
    """Fork a process in a session of its own that calls a function in a directory; its output goes to the log."""

    def enter() -> int:
        os.setsid()
        os.chdir(directory)
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        return function()

    return Forked(enter, dies_with_parent=True)


def _stand_in(rank: Callable[[], int], ranks: int, restarts: int) -> int:
    """Start the ranks, and again where one fails; return 0 once all have ended well."""
    reading, writing = os.pipe()
    Forked(lambda: _keep_store(writing), dies_with_parent=True)
    port = os.read(reading, 16).decode()
    for attempt in range(restarts + 1):
        launched = partial(_be_launched, rank, ranks=ranks, port=port, attempt=attempt, restarts=restarts)
        started = [Forked(partial(launched, number)) for number in range(ranks)]
        while not any(codes := [process.poll() for process in started]):
            if None not in codes:
                return 0
            time.sleep(0.005)
        _end(started)
    return 1


def _keep_store(writing: int) -> int:
    """Keep the store, as long as the launcher lives, and tell its port."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    while True:
        signal.pause()


def _be_launched(rank: Callable[[], int], number: int, *, ranks: int, port: str, attempt: int, restarts: int) -> int:
    """Set what torchrun and Accelerate set for a rank, and be it."""
    os.setsid()
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_MIXED_PRECISION": "no",
        "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    return rank()


def _end(started: Sequence[Forked]) -> None:
    """End what is left of an attempt."""
    deadline = time.monotonic() + GRACE
    left = [process for process in started if process.poll() is None]
    for process in left:
        os.kill(process.pid, signal.SIGTERM)
    while any(process.poll() is None for process in left):
        if time.monotonic() > deadline:
            for process in left:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.005)
