"""Signals: the handler notes a signal, and the run ends at its next safe point, where it calls `raise_if_signalled`.

Foreign code can swallow what a handler raises: a bare `except:` does, and Python itself does in finalisers and in the
callbacks of weak references and forks. So while `signals_deferred`, as in a run and while environments are made, the
handler raises nothing. Elsewhere it raises at once, and the signal stays noted in case that is swallowed.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from evorl.system.console import say
from evorl.system.plugins import place_in_thread

GRACE = 20.0
"""Seconds from a signal to the forced exit of a stuck process; launchers kill after 30."""
HOLDS_LOCK = 3.0
"""Seconds after which faulthandler's timer in C ends a process in which not even the forced exit could run."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""The signals that end a run in order. Clusters announce the end of a job's time by SIGUSR1."""
LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Environment variables set in processes started by `accelerate launch`."""

_noted: int | None = None
"""The first signal that this process has received."""
_deferred = False
"""True while the handler must not raise."""
_resumes: Callable[[], str] = str
"""Says where a run goes on that is resumed after a forced exit, or ""."""
_activity = ""
"""The call of foreign code, or the wait for other ranks, in progress; named if the exit is forced."""


class Interrupted(SystemExit):
    """This process was told to end; the exit code is 128 plus the signal number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextmanager
def signal_handlers() -> Iterator[None]:
    """Raise Interrupted in the main thread at one of SIGNALS, or when the launcher dies: at once, or at a safe point.

    Only the first signal counts, so that the shutdown itself is not interrupted. A process still running GRACE seconds
    later is stuck, and a thread exits it.
    """
    global _noted
    _noted = None

    def note(number: int, frame: FrameType | None) -> None:
        global _noted
        if _noted is None:
            _noted = number
            # Code in C may never let the thread run that forces the exit.
            faulthandler.dump_traceback_later(GRACE + HOLDS_LOCK, exit=True, file=2)
            if not _deferred:
                raise Interrupted(number)

    def report(unraisable: sys.UnraisableHookArgs) -> None:
        # Python swallowed what `note` raised in a finaliser; the next safe point raises it again.
        if not isinstance(unraisable.exc_value, Interrupted):
            report_before(unraisable)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    report_before, sys.unraisablehook = sys.unraisablehook, report
    handled = _heeded()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, note)
    active = [True]
    os.register_at_fork(after_in_child=lambda: _forget(handled) if active else None)
    watch = threading.Thread(target=_watch, args=(reader, set(handled)), name="signals", daemon=True)
    watch.start()
    try:
        yield
        raise_if_signalled()
    finally:
        active.clear()
        sys.unraisablehook = report_before
        for number in handled:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(old_descriptor)
        # Closing is not enough while a forked child, such as an environment's process, holds a copy.
        writer.shutdown(socket.SHUT_WR)
        writer.close()
        watch.join()
        reader.close()
        if signalled() is not None:
            faulthandler.cancel_dump_traceback_later()
            _noted = None


def signalled() -> int | None:
    return _noted


def raise_if_signalled() -> None:
    """End here if this process has received a signal. Raises Interrupted."""
    if _noted is not None:
        raise Interrupted(_noted)


@contextmanager
def signals_deferred(resumes: Callable[[], str] | None = None) -> Iterator[None]:
    """Within the block signals are only noted; the block calls `raise_if_signalled`, and so does its end.

    `resumes` says in words where a run goes on that is resumed after a forced exit of this process.
    """
    global _deferred, _resumes
    outer, _deferred, _resumes = (_deferred, _resumes), True, resumes or _resumes
    try:
        yield
    finally:
        _deferred, _resumes = outer
    if not _deferred:
        raise_if_signalled()


def note_activity(activity: str) -> None:
    """Note the call or the wait that begins now, or "" at its end: a forced exit names it."""
    global _activity
    _activity = activity


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
            signal_byte = reader.recv(1)
            if not signal_byte:
                return
            number = signal_byte[0] if signal_byte[0] in signals else 0
        elif launcher is not None and os.getppid() != launcher:
            say("error: the launcher is gone; ending")
            os.kill(os.getpid(), signal.SIGTERM)
            number = signal.SIGTERM
    deadline = time.monotonic() + GRACE
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not reader.recv(1):
            return
    say(_stuck(number))
    os._exit(128 + number)


def _stuck(number: int) -> str:
    """The line of a forced exit: where the main thread hangs, and where a resumed run goes on."""
    main = threading.main_thread().ident
    where = f"{_activity or 'the same call'}{place_in_thread(main) if main is not None else ''}"
    rank = f"rank {os.environ['RANK']}" if os.environ.get("WORLD_SIZE", "1") != "1" else "the process"
    resumes = f"; {resumes}" if (resumes := _resumes()) else ""
    return (
        f"error: {rank} is still in {where} {GRACE:g} s after {signal.Signals(number).name}, and is ended by "
        f"force{resumes}"
    )
