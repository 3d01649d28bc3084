"""Signal handling: shut down cleanly on a signal, and exit forcibly if that does not succeed."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from evorl.system.console import say

GRACE = 20.0
"""Seconds from a signal to the forced exit of a stuck process; launchers kill after 30."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Environment variables set in processes started by `accelerate launch`."""


PATIENCE = 8.0
"""Seconds for which signals wait for the end of a training step, so that there is time left to save what it did."""


_held: list[int] | None = None
"""Signals deferred until the end of a `signals_wait` block or of a training step; None outside of both."""
_in_steps: list[int] | None = None
"""The list of signals that wait for the end of a training step."""
_overdue = False
"""True if a signal has waited PATIENCE seconds for that end."""


class Interrupted(SystemExit):
    """This process was told to end; the exit code is 128 plus the signal number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextmanager
def signal_handlers() -> Iterator[None]:
    """Raise Interrupted in the main thread at SIGTERM, Ctrl-C or a closed terminal, or when the launcher dies.

    Only the first signal counts, so that the shutdown itself is not interrupted. A process still running GRACE seconds
    later is stuck where no signal reaches it, and a thread exits it.
    """
    received = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not received.is_set():
            received.set()
            if _held is None:
                raise Interrupted(number)
            _held.append(number)
        elif _overdue and _in_steps and _held is _in_steps:
            heed_signals()

    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = _heeded()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, interrupt)
    active = [True]
    os.register_at_fork(after_in_child=lambda: _forget(handled) if active else None)
    watch = threading.Thread(target=_watch, args=(reader, set(handled)), name="signals", daemon=True)
    watch.start()
    try:
        yield
    finally:
        active.clear()
        for number in handled:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(old_descriptor)
        # Closing is not enough while a forked child, such as an environment's process, holds a copy.
        writer.shutdown(socket.SHUT_WR)
        writer.close()
        watch.join()
        reader.close()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Defer signals to the end of a block that must not be interrupted."""
    global _held
    outer, _held = _held, []
    try:
        yield
    finally:
        held, _held = _held, outer
        if held and outer is None:
            raise Interrupted(held[0])
        if held and outer is not None:
            outer.extend(held)


def defer_signals() -> None:
    """Until `heed_signals`, defer signals to the end of a training step, where `held_signal` reports them."""
    global _held, _in_steps, _overdue
    _in_steps, _overdue = [], False
    _held = _in_steps


def held_signal() -> int | None:
    """The signal that waits for the end of a training step, or None."""
    return _in_steps[0] if _in_steps else None


def heed_signals(told: int | None = None) -> None:
    """Stop deferring signals. Raises Interrupted if one has come, or for the signal `told` of another rank."""
    global _held, _in_steps
    number = told or held_signal()
    if _in_steps is not None:
        _held = _in_steps = None
    if number is not None:
        raise Interrupted(number)


@contextmanager
def signals_end_at_once() -> Iterator[None]:
    """Restore the default action of signals, which ends this process immediately.

    For waits in C++ that no handler can interrupt, while there is nothing to clean up yet.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _heeded()}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> list[signal.Signals]:
    """The signals that are not ignored: those that `nohup` ignores stay ignored."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def _forget(handled: list[signal.Signals]) -> None:
    """Restore default signal handling in a forked child, and stop reporting its signals to the parent's thread."""
    signal.set_wakeup_fd(-1)
    for number in handled:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _watch(reader: socket.socket, signals: set[int]) -> None:
    """Wait for a signal or the launcher's death, then force an exit after GRACE; return once handlers are closed."""
    launcher = os.getppid() if any(name in os.environ for name in LAUNCHED) else None
    number = 0
    while not number:
        if select.select([reader], [], [], 1.0)[0]:
            heard = reader.recv(1)
            if not heard:
                return
            number = heard[0] if heard[0] in signals else 0
        elif launcher is not None and os.getppid() != launcher:
            say("error: the launcher is gone; ending")
            os.kill(os.getpid(), signal.SIGTERM)
            number = signal.SIGTERM
    global _overdue
    began = time.monotonic()
    for seconds in (PATIENCE, GRACE):
        while select.select([reader], [], [], max(0.0, began + seconds - time.monotonic()))[0]:
            if not reader.recv(1):
                return
        _overdue = True
        if seconds < GRACE and held_signal() is not None:
            # Its handler runs again, and no longer waits for a step that takes so long.
            os.kill(os.getpid(), number)
    os._exit(128 + number)
