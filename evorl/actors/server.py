"""A process that has imported all that an actor needs, and forks actors: milliseconds each instead of seconds.

It is started by a rank and ends with it, and its actors end with it: by the parent-death signal where there is one,
also in the middle of an environment's own code, and elsewhere when the rank's end of the socket closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import psutil

from evorl.system.processes import die_with_parent

REQUEST = struct.Struct("<3q")
"""What is wanted, and two numbers: the actor and the attempt at it, or a process."""
REPLY = struct.Struct("<q")
START, END = 1, 2
DESCRIPTORS = 5
"""The board's, its lock's, the slots', and the ends of the two pipes that an actor has."""
COMMAND = "from evorl.actors.server import main; main()"
READY = 0
"""The first reply, once everything is imported."""
IMPORTING = 300.0
"""Seconds within which the server must have imported everything."""
STOPPED = 5.0
"""Seconds after which a server that was stopped, as by SIGSTOP, is given up."""
LOOK_EVERY = 0.5
"""Seconds between two looks at a server that does not answer."""
CLOSING = 6.0
"""Seconds that actors may take to close their environments in the end."""
LEAVE = signal.SIGUSR1
"""Tells an actor, which ignores what launchers send, to close its environments and end."""


class ActorServer:
    """The rank's side: starts and ends actors that all have the same `context`."""

    def __init__(self, context: Mapping[str, object], timeout: float) -> None:
        """Start the server, which imports while this process goes on; then it must answer within `timeout` seconds.

        Raises OSError.
        """
        self._timeout = timeout
        self._is_ready = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            # Without -P a module in the working directory could be imported for one of the same name.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self._socket.settimeout(LOOK_EVERY)
        text = json.dumps(dict(context)).encode()
        # One that has ended already shows when it is asked for something.
        with contextlib.suppress(BrokenPipeError):
            self._socket.sendall(REPLY.pack(len(text)) + text)

    @property
    def process(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def start(self, actor: int, attempt: int, descriptors: Sequence[int]) -> int:
        """Return the process of a new actor, which gets copies of these descriptors. Raises OSError."""
        self._wait_until_ready()
        socket.send_fds(self._socket, [REQUEST.pack(START, actor, attempt)], list(descriptors))
        return self._answer(self._timeout)

    def end(self, process: int) -> None:
        """Kill an actor, and wait until it is gone. Raises OSError."""
        self._wait_until_ready()
        self._socket.sendall(REQUEST.pack(END, process, 0))
        self._answer(self._timeout)

    def close(self) -> None:
        """End the server with all its actors, which may first close their environments."""
        self._socket.close()
        try:
            # Before it is ready there are no actors, and nobody needs its imports any more.
            self._process.wait(timeout=CLOSING + 1.0 if self._is_ready else 0.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the server; the system then kills its actors."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            self._answer(IMPORTING)
            self._is_ready = True

    def _answer(self, patience: float) -> int:
        """Return the server's next reply. Raises OSError where it has ended, is stopped, or takes too long."""
        began = time.monotonic()
        stopped = 0.0
        while True:
            try:
                reply = _received(self._socket, REPLY.size)
                break
            except TimeoutError:
                stopped = stopped + LOOK_EVERY if _is_stopped(self._process.pid) else 0.0
                if stopped >= STOPPED:
                    raise TimeoutError(f"has been stopped for {STOPPED:g} s") from None
                if time.monotonic() > began + patience:
                    raise TimeoutError(f"has not answered for {patience:g} s") from None
        if reply is None:
            raise ConnectionError("has ended")
        return int(REPLY.unpack(reply)[0])


def main() -> None:
    """Serve the rank that started this process, until it closes its end of the socket."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Launchers and terminals send these to whole groups of processes; the rank decides what they mean.
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    import evorl.actors.actor

    length = _received(connection, REPLY.size)
    text = _received(connection, REPLY.unpack(length)[0]) if length else None
    if text is None:
        return
    context = json.loads(text)
    connection.sendall(REPLY.pack(READY))
    actors: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, REQUEST.size, DESCRIPTORS)
        if not message:
            break
        kind, number, attempt = REQUEST.unpack(message)
        if kind == START:
            number = _fork(connection, partial(evorl.actors.actor.run, context, number, attempt, descriptors))
            actors.add(number)
        elif number in actors:
            _end(number)
            actors.discard(number)
        for descriptor in descriptors:
            os.close(descriptor)
        # A rank that is interrupted hears no answer any more; the end of the connection shows above.
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(REPLY.pack(number))
    _let_go(actors)


def _let_go(actors: Collection[int]) -> None:
    """Let actors close their environments and end; kill those that take too long."""
    living = set(actors)
    for process in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, LEAVE)
    deadline = time.monotonic() + CLOSING
    while living and time.monotonic() < deadline:
        living = {process for process in living if os.waitpid(process, os.WNOHANG) == (0, 0)}
        time.sleep(0.01)
    for process in living:
        _end(process)


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).status() == psutil.STATUS_STOPPED
    return False


def _fork(connection: socket.socket, run: Callable[[], None]) -> int:
    server = os.getpid()
    process = os.fork()
    if process:
        _lead_group(process)
        return process
    code = 1
    try:
        _lead_group(0)
        connection.close()
        die_with_parent(server)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end(process: int) -> None:
    """Kill an actor, which nobody else has waited for, so that the number is still its own, with its processes.

    Those of its environments hold its pipe, too: one that hangs would keep it from ending.
    """
    # Without a group of its own only the actor would be left to kill, and waiting for it must not last for ever.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _lead_group(process: int) -> None:
    """Let an actor lead a group of processes; it and the server both see to that, as either may be the first."""
    with contextlib.suppress(OSError):
        os.setpgid(process, process)


def _received(connection: socket.socket, size: int) -> bytes | None:
    """Return so many bytes, or None where the other side is gone."""
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return parts
