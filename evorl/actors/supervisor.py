"""Supervision of actor processes: start them, hand out messages, receive messages, replace those that die or hang."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import termios
import time
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from evorl.actors.actor import ARRIVAL, FAILED, NUMBER
from evorl.actors.memory import Board
from evorl.actors.server import ActorServer, kill_group
from evorl.config.learning import ActorSettings
from evorl.system.files import file_errors
from evorl.system.signals import raise_if_signalled
from evorl.types.outcomes import EvorlWarning, RunFailed, UserError

LOOK_EVERY = 0.5
"""Seconds between liveness checks."""
LONGEST_LOOK = 5.0
"""The most seconds between two checks that count against an actor: in a longer time all processes may have paused."""
PATIENCE = 60.0
"""Seconds without a step after which an actor that has a message to fill is replaced, and without an answer of the
server after which the run ends. Below `run.timeout`, so that the other ranks do not give up meanwhile."""
START_PATIENCE = 180.0
"""Seconds that an actor has for its first step: it makes and resets all its environments before that. If it takes none,
the run ends, before the other ranks give up."""
RESTARTS = 3
"""Consecutive replacements of an actor without a rollout in between, before the run gives up."""


COUNT_KEY = "actors.count"
"""The setting that too many open files name: each actor takes four."""


class Arrival(NamedTuple):
    """A filled message by number: the actor that filled it, and the generation and version of its parameters."""

    actor: int
    number: int
    generation: int
    version: int


@dataclass
class ActorProcess:
    """An actor's process, our ends of its pipes, and the numbers of the messages that it has to fill.

    `attempt` counts the processes that it replaces, `failures` those of them that have ended since the last message.
    `hung` says why it was killed, if it was. At time `asked` it started or was last handed a message. `beat` is its
    last heartbeat when last looked at, after which it has had a message to fill for `silent` seconds; `has_stepped`
    says whether there was one. `pipes` closes `writer` and `reader`.
    """

    index: int
    process: int
    writer: int
    reader: int
    messages: set[int]
    attempt: int = 0
    failures: int = 0
    hung: str = ""
    asked: float = field(default_factory=time.monotonic)
    beat: float = 0.0
    silent: float = 0.0
    has_stepped: bool = False
    pipes: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def is_gone(self) -> bool:
        """True if the actor was killed and all it sent is received; its helpers may hold its pipe open for ever."""
        return not self.process and not _unread(self.reader)


class Supervisor:
    """Starts a rank's actors and replaces those that die or hang; a replacement takes over the messages."""

    def __init__(
        self,
        settings: ActorSettings,
        context: Mapping[str, object],
        board: Board,
        memories: Sequence[int],
        first: int,
    ) -> None:
        """Start the server, which is sent `context`.

        `memories` are the descriptors of the memory of each actor's messages, `first` is the number of the first actor
        over all ranks.
        """
        self._settings = settings
        self._first = first
        self._selector = selectors.DefaultSelector()
        try:
            self._server = ActorServer(context, PATIENCE)
        except BaseException:
            self._selector.close()
            raise
        self._board = board
        self._memories = memories
        self._actors: list[ActorProcess] = []
        self._ready: deque[ActorProcess] = deque()
        self._looked = time.monotonic()
        self.restarts = 0
        """Actors replaced since the learner last reset this count."""

    @property
    def started(self) -> bool:
        return bool(self._actors)

    @property
    def busy(self) -> bool:
        """True if an actor has a message to fill, or a filled one that was not received."""
        return any(actor.messages for actor in self._actors)

    @property
    def waiting(self) -> int:
        """The number of actors' messages not received yet."""
        return sum(_unread(actor.reader) for actor in self._actors) // ARRIVAL.size

    def start(self) -> None:
        """Start all actors, without messages. Raises UserError if they need too many open files."""
        with file_errors(COUNT_KEY):
            for index in range(self._settings.count):
                self._actors.append(self._start_actor(index))

    def close(self) -> None:
        for actor in self._actors:
            actor.pipes.close()
        self._actors = []
        self._selector.close()
        self._server.close()

    def hand_out(self, index: int, number: int) -> None:
        actor = self._actors[index]
        actor.asked = time.monotonic()
        actor.messages.add(number)
        _tell(actor, number)

    def receive(self) -> Arrival:
        """Wait for a message. Raises UserError if an actor reports one, RunFailed if actors cannot be kept alive."""
        while True:
            actor = self._next()
            payload = b"" if actor.is_gone else os.read(actor.reader, ARRIVAL.size)
            if not payload:
                self._replace(actor)
                continue
            number, generation, version = ARRIVAL.unpack(payload)
            if number == FAILED:
                # Do not wait for the end of its pipe: processes forked by its environments may hold it open.
                with open(actor.reader, "rb", closefd=False) as pipe:
                    text = pipe.read(generation).decode(errors="replace")
                raise UserError(f"{text} (in actor {self._number(actor)})")
            actor.messages.discard(number)
            actor.failures = 0
            return Arrival(actor.index, number, generation, version)

    def _next(self) -> ActorProcess:
        """An actor that has sent a message or has ended; in lockstep, the first that has a message to fill."""
        if self._settings.lockstep:
            first = next(actor for actor in self._actors if actor.messages)
            poll = select.poll()
            poll.register(first.reader, select.POLLIN)
            while not (poll.poll(1000 * LOOK_EVERY) or first.is_gone):
                self.look()
            return first
        self.look()  # Others may fill their messages so fast that some are always ready.
        while not self._ready:
            self._ready.extend(key.data for key, _ in self._selector.select(LOOK_EVERY))
            self.look()
            self._ready.extend(actor for actor in self._actors if actor.is_gone and actor not in self._ready)
        return self._ready.popleft()

    def look(self) -> None:
        """Kill actors that have a message to fill but have not stepped for too long.

        Raises Interrupted after a signal: whoever waits for an actor calls this.
        """
        raise_if_signalled()
        now = time.monotonic()
        if now < self._looked + LOOK_EVERY:
            return
        before, self._looked = self._looked, now
        for actor in self._actors:
            # One that has filled all of its messages may be idle because the learner was busy, so it is not late.
            is_idle = _unread(actor.reader) >= len(actor.messages) * ARRIVAL.size
            beat = float(self._board.beats[actor.index])
            passed = min(now - max(before, actor.asked), LONGEST_LOOK)
            actor.silent = 0.0 if is_idle or beat != actor.beat else actor.silent + passed
            actor.has_stepped |= beat != actor.beat
            actor.beat = beat
            patience = PATIENCE if actor.has_stepped else START_PATIENCE
            if actor.process and actor.silent > patience:
                actor.hung = f"took no {'' if actor.has_stepped else 'first '}step for {patience:g} s"
                self._end(actor)

    def _number(self, actor: ActorProcess) -> int:
        """The number of an actor among those of all ranks, as in metrics."""
        return self._first + actor.index

    def _end(self, actor: ActorProcess) -> None:
        """Kill an actor if it is alive; what it has already sent can still be received."""
        if actor.process:
            try:
                self._server.end(actor.process)
            except OSError as error:
                raise self._lost() from error
            actor.process = 0

    def _lost(self) -> RunFailed:
        """The error for a server that is lost with all its actors; what is left of them is killed."""
        self._server.kill()
        for actor in self._actors:
            if actor.process:
                kill_group(actor.process)  # The processes of its environments do not end with the server.
                actor.process = 0
        return RunFailed("the process that starts actors was lost, or does not answer; the run can be resumed")

    def _replace(self, actor: ActorProcess) -> None:
        """Replace an actor that has ended. Raises RunFailed if several did without a message in between."""
        self._selector.unregister(actor.reader)
        actor.pipes.close()
        self._end(actor)
        if actor.failures >= RESTARTS or (actor.hung and not actor.has_stepped):
            raise RunFailed(
                f"actor {self._number(actor)} ended {actor.failures + 1} times without a rollout in between; "
                f"{f'it {actor.hung}' if actor.hung else 'see its output above'}"
            )
        what = actor.hung or "ended, or was killed"
        warnings.warn(f"actor {self._number(actor)} {what}; it is started again", EvorlWarning, stacklevel=2)
        self.restarts += 1
        self._ready = deque(ready for ready in self._ready if ready is not actor)
        with file_errors(COUNT_KEY):
            self._actors[actor.index] = self._start_actor(
                actor.index, actor.messages, actor.attempt + 1, actor.failures + 1
            )

    def _start_actor(
        self, index: int, messages: Iterable[int] = (), attempt: int = 0, failures: int = 0
    ) -> ActorProcess:
        with contextlib.ExitStack() as ours:
            # A pipe closes when the last holder of its other end exits; that must be the actor alone.
            with contextlib.ExitStack() as theirs:
                theirs_in, writer = os.pipe()
                theirs.callback(os.close, theirs_in)
                ours.callback(os.close, writer)
                reader, theirs_out = os.pipe()
                theirs.callback(os.close, theirs_out)
                ours.callback(os.close, reader)
                shared = (self._board.memory.descriptor, self._board.lock, self._memories[index])
                try:
                    process = self._server.start(index, attempt, (*shared, theirs_in, theirs_out))
                except OSError as error:
                    raise self._lost() from error
            actor = ActorProcess(index, process, writer, reader, set(messages), attempt, failures)
            actor.beat = float(self._board.beats[index])  # That of the actor that it replaces, if it made a step.
            self._selector.register(reader, selectors.EVENT_READ, actor)
            actor.pipes = ours.pop_all()
        for number in sorted(actor.messages):
            _tell(actor, number)
        return actor


def _tell(actor: ActorProcess, number: int) -> None:
    # If the actor has ended, its other pipe reports it.
    with contextlib.suppress(BrokenPipeError):
        os.write(actor.writer, NUMBER.pack(number))


def _unread(reader: int) -> int:
    """The number of unread bytes in a pipe."""
    count = array("i", [0])
    fcntl.ioctl(reader, termios.FIONREAD, count)
    return count[0]
