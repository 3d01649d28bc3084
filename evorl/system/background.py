"""Background threads: evorl's own end before the process exits, and no other thread can block the exit.

A thread that waits inside a C++ call when the interpreter exits cannot return from it, and the whole process aborts
(`terminate called without an active exception`), even after successful work. A non-daemon thread keeps the interpreter
waiting until it returns, and an environment or a library may have started one that never does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from evorl.system.console import say

PATIENCE = 6.0
"""Seconds that a process waits for its threads at exit: more than a call to the ranks' store can take."""

END_WITHIN = 5.0
"""Seconds that other threads have to end after the main thread."""


class Background(threading.Thread):
    """A daemon thread that runs `work`, which must return soon after the event passed to it is set."""

    def __init__(self, work: Callable[[threading.Event], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._over = threading.Event()

    def start(self) -> None:
        """Start the thread; it is stopped at the latest when the interpreter exits."""
        atexit.unregister(end_background)
        atexit.register(end_background)
        super().start()

    def run(self) -> None:
        self._work(self._over)

    def stop(self) -> None:
        """Signal the work to return."""
        self._over.set()


def end_background(patience: float = PATIENCE) -> list[str]:
    """Stop all background threads of this process and join them; return the names of those still running."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, Background)]
    for thread in threads:
        thread.stop()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def end_now(code: int) -> None:
    """Exit this process with a code immediately, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class LastWatch(threading.Thread):
    """A thread that names the threads that block the interpreter's exit, and then exits the process with `code`.

    Without a code, as in a user's own script, it only names them.
    """

    def __init__(self, code: int | None, seconds: float) -> None:
        super().__init__(name="last watch", daemon=True)
        self.code = code
        self._seconds = seconds

    def run(self) -> None:
        threading.main_thread().join()
        time.sleep(self._seconds)
        others = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]
        if others:
            names = ", ".join(map(repr, dict.fromkeys(others)))
            does = "Python waits for them" if self.code is None else "the process ends without them"
            say(
                f"warning: threads still run {self._seconds:g} s after the program's end ({names}), and {does}; an "
                "environment's `close` has to end the threads that it started"
            )
        if self.code is not None:
            end_now(self.code)


_last_watch: LastWatch | None = None


def limit_end(code: int | None, seconds: float = END_WITHIN) -> None:
    """Limit the interpreter's wait for other threads at exit to some seconds, then exit with `code`.

    Without a code the wait is not limited, but the threads are named.
    """
    global _last_watch
    # The parent's threads do not exist in a forked process.
    if _last_watch is not None and _last_watch.is_alive():
        _last_watch.code = code
    else:
        _last_watch = LastWatch(code, seconds)
        _last_watch.start()
