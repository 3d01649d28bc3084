"""How environments are closed: within a deadline, and with their problems reported in one line."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from evorl.system.console import say
from evorl.system.plugins import described
from evorl.system.signals import Interrupted

CLOSE_WITHIN = 4.0
"""Seconds allowed for an environment's own `close`."""
AFTER_A_HANG = 0.05
"""Seconds allowed for `close` once another copy of the same environment has hung."""

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
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        report(f"{name} raised {described(error)} while it was closed")
    except _OutOfTime:
        if name not in _hanging:
            report(f"{name} did not close within {seconds:g} s and is abandoned")
        _hanging.add(name)


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
