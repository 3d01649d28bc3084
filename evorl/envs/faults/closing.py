"""Closing of environments, within a deadline, with their problems reported in one line."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from evorl.envs.continuation import Vector
from evorl.system.console import say
from evorl.system.plugins import described
from evorl.system.signals import Interrupted

CLOSE_WITHIN = 4.0
"""Seconds allowed for an environment's own `close`."""
AFTER_A_HANG = 0.05
"""Seconds allowed for `close` once another copy of the same environment has hung."""

END_WITHIN = 5.0
"""Seconds allowed for the worker processes of an AsyncVectorEnv to close their environments and exit."""

_problems: set[str] = set()
"""Problems already reported by this process: 32 copies of an environment share the same bug."""
_hanging: set[str] = set()
"""Names of environments of which at least one copy hung in `close`."""


class _OutOfTime(BaseException):
    """A time limit expired. Derives from BaseException because environments may catch Exception."""


def close_in_time(close: Callable[[], object], name: str) -> None:
    """Call `close` of the environment `name`. An exception or a hang is reported in one line, only once."""
    seconds = AFTER_A_HANG if name in _hanging else CLOSE_WITHIN
    try:
        with _time_limit(seconds):
            close()
    except (Interrupted, KeyboardInterrupt):
        raise
    except _OutOfTime:
        if name not in _hanging:
            report(f"{name} did not close within {seconds:g} s and is abandoned")
        _hanging.add(name)
    except BaseException as error:
        report(f"{name} raised {described(error)} while it was closed")


def close_vector(vector: Vector, name: str) -> None:
    """Close a vector environment, possibly broken, and terminate its worker processes."""
    if vector.closed:
        return
    vector.closed = True
    if isinstance(vector, SyncVectorEnv):
        for env in vector.envs:  # Each is a GuardedEnv with its own time limit.
            env.close()
        return
    if not isinstance(vector, AsyncVectorEnv):
        vector.closed = False
        close_in_time(vector.close, name)
        return
    # AsyncVectorEnv.close would first wait for pending results, which dead workers never send.
    for pipe in vector.parent_pipes:
        with contextlib.suppress(Exception):
            pipe.send(("close", None))
    deadline = time.monotonic() + END_WITHIN
    killed = 0
    for process in vector.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            killed += 1
            process.kill()
            process.join()
    if killed:
        processes = "process" if killed == 1 else "processes"
        report(f"{killed} {processes} of {name} did not end within {END_WITHIN:g} s, and had to be killed")


def report(problem: str) -> None:
    """Print a problem of closing, unless this process has printed it before."""
    if problem not in _problems:
        _problems.add(problem)
        say(f"warning: environment.id: {problem}")


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime in the main thread after `seconds`; other threads receive no signals and so have no limit.

    `close` runs in the calling thread because windows and databases can often be closed only by the thread that opened
    them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    handler = signal.signal(signal.SIGALRM, interrupt)
    before, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # The alarm may still raise before the timer is off.
        signal.setitimer(signal.ITIMER_REAL, before, interval)
        signal.signal(signal.SIGALRM, handler)
