"""Threads beside the main one, which end before their process does.

A thread that waits inside a C++ call when the interpreter ends cannot return from it, and the whole process aborts
(`terminate called without an active exception`), whatever it has achieved.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

PATIENCE = 6.0
"""Seconds that the end of a process waits for its threads: more than their calls to a store can last (heartbeat.py)."""


class Background(threading.Thread):
    """A thread that does `work`, which returns soon after the event that it is given is set."""

    def __init__(self, work: Callable[[threading.Event], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._over = threading.Event()

    def start(self) -> None:
        """Start, and be stopped at the latest when the interpreter ends."""
        atexit.unregister(end_background)
        atexit.register(end_background)
        super().start()

    def run(self) -> None:
        self._work(self._over)

    def stop(self) -> None:
        """Ask the work to return."""
        self._over.set()


def end_background(patience: float = PATIENCE) -> list[str]:
    """Stop all such threads of this process and wait for them; gives the names of those that do not end."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, Background)]
    for thread in threads:
        thread.stop()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
