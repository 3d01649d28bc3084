"""A fork server: it imports all that an actor needs, and then forks actors in milliseconds instead of seconds.

A rank starts it. It ends with the rank: by the parent-death signal where the system has one, and elsewhere when the
rank's end of the socket closes. It then kills its actors with the processes of their environments. If it is killed
itself, its actors end with it, even in the middle of an environment's own code, and the rank kills what is left.
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
from typing import NoReturn

from evorl.system.processes import die_with_parent
from evorl.system.signals import SIGNALS

REQUEST = struct.Struct("<3q")
"""Wire format of a request: (START, actor, attempt) or (END, process id, 0)."""
REPLY = struct.Struct("<q")
START, END = 1, 2
DESCRIPTORS = 5
"""Descriptors passed to an actor: the board, its lock, the messages, and the actor's ends of two pipes."""
COMMAND = "from evorl.actors.server import main; main()"
READY = 0
"""The first reply, sent once everything is imported."""
IMPORTING = 300.0
"""Seconds that the server's imports may take."""
CLOSING = 6.0
"""Seconds that actors may take to close their environments at shutdown."""
ORPHANED = signal.SIGUSR2
"""Sent to the server by the kernel when the rank ends, however it ends."""


class ActorServer:
    """The rank's side of the server: starts and kills actors that share one `context`."""

    def __init__(self, context: Mapping[str, object], timeout: float) -> None:
        """Start the server, which imports in the background. Once ready, it must answer within `timeout` seconds.

        Raises OSError.
        """
        self._timeout = timeout
        self._is_ready = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with contextlib.ExitStack() as opened:
            opened.callback(self._socket.close)
            with theirs:
                # The server inherits this mask, so the signals are blocked until it ignores them itself.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                try:
                    # Without -P, a module in the working directory could shadow one of the same name.
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno()), str(os.getpid())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            opened.callback(self.kill)
            text = json.dumps(dict(context)).encode()
            # The server reads what exceeds the socket's buffer only once it has imported.
            self._socket.settimeout(IMPORTING)
            # If the server has already ended, the first request reports it.
            with contextlib.suppress(BrokenPipeError):
                self._socket.sendall(REPLY.pack(len(text)) + text)
            opened.pop_all()

    def start(self, actor: int, attempt: int, descriptors: Sequence[int]) -> int:
        """Fork an actor that gets copies of these descriptors; return its process id. Raises OSError."""
        self._wait_until_ready()
        socket.send_fds(self._socket, [REQUEST.pack(START, actor, attempt)], list(descriptors))
        return self._answer()

    def end(self, process: int) -> None:
        """Kill an actor and wait until it is gone. Raises OSError."""
        self._wait_until_ready()
        self._socket.sendall(REQUEST.pack(END, process, 0))
        self._answer()

    def close(self) -> None:
        """Stop the server and its actors, which are given time to close their environments."""
        # Processes that were forked since, such as those of environments, hold the socket open.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            # Before the server is ready there are no actors to wait for.
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
            self._answer()
            self._is_ready = True
            self._socket.settimeout(self._timeout)

    def _answer(self) -> int:
        """The server's next reply. Raises OSError if it has ended or is too slow."""
        reply = _received(self._socket, REPLY.size)
        if reply is None:
            raise ConnectionError("has ended")
        return int(REPLY.unpack(reply)[0])


def main() -> None:
    """Serve the rank that started this process until it closes its end of the socket."""
    # They are sent to whole process groups; the rank alone decides how to react.
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    actors: set[int] = set()
    signal.signal(ORPHANED, lambda *_: _end_all(actors))
    die_with_parent(int(sys.argv[2]), ORPHANED)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Imported here, where signals are ignored: it takes seconds.
    from evorl.actors import actor

    length = _received(connection, REPLY.size)
    text = _received(connection, REPLY.unpack(length)[0]) if length else None
    if text is None:
        return
    context = json.loads(text)
    connection.sendall(REPLY.pack(READY))
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, REQUEST.size, DESCRIPTORS)
        if not message:
            break
        kind, number, attempt = REQUEST.unpack(message)
        if kind == START:
            number = _fork(connection, partial(actor.run, context, number, attempt, descriptors))
            actors.add(number)
        elif number in actors:
            _end(number)
            actors.discard(number)
        for descriptor in descriptors:
            os.close(descriptor)
        # An interrupted rank no longer reads replies; the loop ends when the connection closes.
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(REPLY.pack(number))
    _let_go(actors, actor.LEAVE)


def _let_go(actors: Collection[int], leave: int) -> None:
    """Send actors the signal to close their environments and exit; kill those that take longer than CLOSING."""
    living = set(actors)
    for process in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, leave)
    deadline = time.monotonic() + CLOSING
    while living and time.monotonic() < deadline:
        living = {process for process in living if not _has_left(process)}
        time.sleep(0.01)
    for process in living:
        _end(process)


def _has_left(process: int) -> bool:
    """True once an actor has exited; what its environments left running is killed then."""
    if os.waitpid(process, os.WNOHANG) == (0, 0):
        return False
    kill_group(process)
    return True


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
        signal.signal(ORPHANED, signal.SIG_DFL)
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
    """Kill an actor with its process group and reap it. Nobody else reaps it, so the process id is still its own.

    Its environments' processes also hold its pipe: one that hangs would keep the pipe open.
    """
    kill_group(process)
    os.waitpid(process, 0)


def _end_all(actors: Collection[int]) -> NoReturn:
    """Kill all actors with their process groups and exit: the rank was killed."""
    for process in list(actors):
        kill_group(process)
    os._exit(1)


def kill_group(actor: int) -> None:
    """Kill the process group that an actor leads: the actor and the processes of its environments."""
    # A process group keeps its id for as long as it has members.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(actor, signal.SIGKILL)


def _lead_group(process: int) -> None:
    """Make an actor the leader of a process group. The actor and the server both do this, as either may run first."""
    with contextlib.suppress(OSError):
        os.setpgid(process, process)


def _received(connection: socket.socket, size: int) -> bytes | None:
    """Read `size` bytes, or return None if the other side is gone."""
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return parts
