"""Rendezvous, heartbeats and pauses: what the ranks of one launch attempt agree on through a store that outlives it.

Launchers count restarts separately (`TORCHELASTIC_RESTART_COUNT` differs between hosts once a host has joined or left),
and entries of dead attempts stay in the store. The main process therefore draws a name for the attempt, and declares it
begun once every rank has answered under that name with a name of its own. Heartbeats in the same store name a rank that
is missing.

For a pause, all ranks stop after the same training step, without a collective in every step. A rank that wants a pause
requests it in the store. A thread on every rank sees the request, even while the rank waits in a collective, and
answers with the step that its rank is in. All ranks pause after the largest answer: none has gone further, because each
waits at the end of the step it answered until all others have answered.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import uuid
from typing import Any, Protocol

from evorl.system.background import Background
from evorl.system.processes import end_sibling, namespace, started_at

POLL = 0.02
"""Polling interval of the store in seconds."""
CURRENT, LAUNCH = "evorl/attempt", "evorl/launch"


class Store(Protocol):
    """A key-value store shared by all ranks."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def meet(store: Store, rank: int, size: int, mine: dict[str, Any], timeout: float) -> tuple[str, list[dict[str, Any]]]:
    """The attempt's name and the self-description of each of its ranks.

    `mine` is this rank's JSON description. Raises TimeoutError if not all ranks arrive within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    own = uuid.uuid4().hex
    answer = json.dumps({"own": own, "says": mine})
    if rank == 0:
        store.set(CURRENT, own)
        everyones = [json.loads(answer)] + [_answer(store, own, other, deadline) for other in range(1, size)]
        store.set(f"{own}/begun", json.dumps(everyones))
        return own, [one["says"] for one in everyones]
    answered = ""
    while time.monotonic() < deadline:
        if store.check([CURRENT]):
            name = store.get(CURRENT).decode()
            if name != answered:
                # The name may be a dead attempt's, which never begins: then a newer name will replace it.
                store.set(f"{name}/{rank}", answer)
                answered = name
            if store.check([f"{name}/begun"]):
                everyones = json.loads(store.get(f"{name}/begun"))
                if len(everyones) == size and everyones[rank]["own"] == own:
                    return name, [one["says"] for one in everyones]
        time.sleep(POLL)
    raise TimeoutError("the main process did not start the attempt in time")


def launch_name(store: Store) -> str:
    """The name of the launch, common to all its attempts while its store lives."""
    return store.compare_set(LAUNCH, "", uuid.uuid4().hex).decode()


def _answer(store: Store, name: str, rank: int, deadline: float) -> dict[str, Any]:
    while not store.check([f"{name}/{rank}"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} did not join in time")
        time.sleep(POLL)
    answer: dict[str, Any] = json.loads(store.get(f"{name}/{rank}"))
    return answer


INTERVAL = 1.0
"""Seconds between two heartbeats."""
SILENT = 4 * INTERVAL
"""Seconds without a heartbeat after which a rank counts as dead or stopped."""

TOGETHER = 2.0
"""Seconds within which ranks report the same error."""


class Heartbeat:
    """A thread that publishes every `interval` seconds that this rank is alive and which collective it waits for."""

    def __init__(self, store: Store, rank: int, size: int, interval: float = INTERVAL) -> None:
        self.waits_for: str | None = None
        self._store = store
        self._rank = rank
        self._size = size
        self._interval = interval
        self._count = 0
        self._host = socket.gethostname()
        self._processes = namespace()
        self._started_at = started_at(os.getpid())
        self._last_words = ""
        self._give()
        Background(self._go_on, "heartbeats").start()

    def missing(self) -> str:
        """Describe which ranks failed to arrive; stopped ones on this machine are killed when this process exits.

        A stopped process handles no signals, and its launcher would wait for it for another 30 seconds. It is killed
        together with this process because the launcher ends all others at the first exit, before they could report
        anything.
        """
        with contextlib.suppress(RuntimeError):
            before = self._read()
            time.sleep(SILENT)
            after = self._read()
            words = []
            for rank, beat in after.items():
                if beat["last_words"]:
                    words.append(f"rank {rank} on {beat['host']} ended: {beat['last_words']}")
                elif beat == before.get(rank):
                    words.append(f"rank {rank} on {beat['host']} has sent no heartbeat for {SILENT:g} s or more")
                    if beat["processes"] == self._processes:
                        atexit.register(end_sibling, beat["pid"], beat["started_at"])
                elif beat["waits_for"] is None:
                    words.append(f"rank {rank} on {beat['host']} is alive but did not arrive")
            return " and ".join(words) or "another rank died"
        return "another rank died, and the launcher's store with it"

    def end(self, last_words: str) -> None:
        """Publish why this rank ends."""
        self._last_words = last_words
        with contextlib.suppress(RuntimeError):
            self._give()

    def last_words(self) -> str:
        """The reasons that other ranks published for ending, or an empty string."""
        with contextlib.suppress(RuntimeError):
            reasons = {rank: beat["last_words"] for rank, beat in self._read().items()}
            return "; ".join(f"rank {rank}: {words}" for rank, words in reasons.items() if words)
        return ""

    def is_told_below(self, last_words: str, seconds: float = TOGETHER) -> bool:
        """True if a lower rank ends with the same message, waiting up to `seconds`."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while True:
                if any(rank < self._rank and beat["last_words"] == last_words for rank, beat in self._read().items()):
                    return True
                if not self._rank or time.monotonic() > deadline:
                    return False
                time.sleep(0.1)
        return False

    def _read(self) -> dict[int, dict[str, Any]]:
        """The last heartbeat of every other rank that has sent one."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return {rank: json.loads(self._store.get(str(rank))) for rank in others if self._store.check([str(rank)])}

    def _give(self) -> None:
        self._count += 1
        beat = {
            "host": self._host,
            "processes": self._processes,
            "pid": os.getpid(),
            "started_at": self._started_at,
            "last_words": self._last_words,
            "count": self._count,
            "waits_for": self.waits_for,
        }
        self._store.set(str(self._rank), json.dumps(beat))

    def _go_on(self, over: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # The store is gone, and its readers with it.
            while not over.wait(self._interval):
                self._give()


PAUSE_INTERVAL = 0.25
"""Polling interval for pause requests in seconds."""
PAUSE_POLL = 0.005
"""Polling interval of a rank that waits for answers, in seconds."""
PATIENCE = 4.0
"""Seconds for which a rank that must end waits for answers: another may have died."""
NOWHERE = -1
"""The answer of a rank that trains no steps, as in evaluation."""
SAVE = 0
"""The reason of a pause to save; other reasons are the numbers of signals."""


class Pauses:
    """Agreement between ranks on the step after which all of them pause.

    Ranks that train `together` must pause after the same step; others do so each after its own.
    """

    def __init__(self, store: Store | None, rank: int, size: int, timeout: float, *, together: bool) -> None:
        """Without a `store` this rank is alone."""
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._together = together
        self._lock = threading.Lock()
        self._number = 0
        """The pauses that have been agreed on, or given up."""
        self._done = NOWHERE
        """The steps that this rank has completed in its generation, or NOWHERE."""
        self._steps = 0
        self._answer: int | None = None
        """This rank's answer to the next pause, once it is asked for."""
        self._end: int | None = None
        """The step after which all ranks pause, once they have agreed."""
        self.reason = SAVE
        """The reason of the last pause: SAVE, or the number of a signal."""
        self._listener = Background(self._listen, "pauses")
        if store is not None:
            self._listener.start()

    def begin(self, done: int, steps: int) -> None:
        """Enter the `steps` steps of a generation, of which `done` are complete."""
        with self._lock:
            self._done, self._steps = done, steps

    def leave(self) -> None:
        """Leave the steps of a generation."""
        with self._lock:
            self._done = NOWHERE
            if self._answer is not None:
                self._resolve()

    def close(self) -> None:
        """Stop answering requests."""
        self._listener.stop()

    def reached(self, done: int, wanted: int | None = None) -> bool | None:
        """True if all ranks pause now, after `done` steps; None if one was requested but is impossible.

        `wanted` requests a pause: SAVE or a signal's number.
        """
        with self._lock:
            self._done = done
            if wanted is not None and self._answer is None:
                self._ask(wanted)
            answer = self._answer
        if answer is None or done < answer:
            return False
        if self._end is None:
            answers = [answer] if self._store is None else self._answers(answer)
            if answers is None or NOWHERE in answers:
                with self._lock:
                    self._resolve()
                return None
            self._end = max(answers) if self._together else answer
        if done < self._end:
            return False
        with self._lock:
            self._resolve()
        return True

    def _ask(self, reason: int) -> None:
        if self._store is None:
            self.reason, self._answer = reason, self._done
        else:
            self._store.compare_set(str(self._number), "", str(reason))
            self._look(self._done)

    def _resolve(self) -> None:
        self._number += 1
        self._answer = self._end = None

    def _answers(self, mine: int) -> list[int] | None:
        """Wait for the answers of all ranks and return them, or None if one does not answer in time."""
        assert self._store is not None
        keys = [f"{self._number}/{rank}" for rank in range(self._size)]
        patience = self._timeout if self.reason == SAVE else PATIENCE
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):
            while True:
                # Read before the answers: this process may be held up between them.
                expired = time.monotonic() >= deadline
                if self._store.check(keys):
                    return [int(self._store.get(key)) for key in keys]
                if expired:
                    break
                time.sleep(PAUSE_POLL)
        return None

    def _look(self, answer: int) -> None:
        """Answer if a pause is asked for."""
        assert self._store is not None
        key = str(self._number)
        if self._store.check([key]):
            self.reason = int(self._store.get(key))
            self._store.set(f"{self._number}/{self._rank}", str(answer))
            if answer == NOWHERE:
                self._number += 1
            else:
                self._answer = answer

    def _listen(self, over: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # The store is gone, and the other ranks with it.
            while not over.wait(PAUSE_INTERVAL):
                with self._lock:
                    if self._answer is None:
                        self._look(self._done + 1 if NOWHERE < self._done < self._steps else NOWHERE)
