"""Standard streams that are broken pipes."""

from __future__ import annotations

import os
import select
import sys
from typing import TextIO


def reader_has_gone() -> bool:
    """True if stdout is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # There is no descriptor: stdout is closed, or replaced by a file in memory.
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard(stream: TextIO) -> None:
    """Discard what is buffered for a stream and all that follows: Python would fail when it flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
