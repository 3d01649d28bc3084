"""Pauses: all ranks stop after the same training step, without a collective in every step.

A rank that wants a pause requests it in the launcher's store. A thread on every rank sees the request, even while the
rank waits in a collective, and answers with the step that its rank is in. All ranks pause after the largest answer:
none has gone further, because each waits at the end of the step it answered until all others have answered.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

from torch._C._distributed_c10d import Store

PAUSE_INTERVAL = 0.25
"""Polling interval for pause requests in seconds."""
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
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="pauses", daemon=True)
        if store is not None:
            self._listener.start()

    def begin(self, done: int, steps: int) -> None:
        """Enter the `steps` steps of a generation, of which `done` are complete."""
        with self._lock:
            self._done, self._steps = done, steps

    def leave(self) -> None:
        with self._lock:
            self._done = NOWHERE
            if self._answer is not None:
                self._resolve()

    def close(self) -> None:
        """Stop answering requests.

        The thread is joined: one that is inside C++ when the interpreter ends would abort the process.
        """
        self._over.set()
        if self._store is not None:
            self._listener.join()

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
        outcome = "missed"
        with contextlib.suppress(RuntimeError):
            self._store.wait(keys, timedelta(seconds=patience))
            outcome = "met"
        with contextlib.suppress(RuntimeError):
            # The first rank decides for all: one that answers late must not pause where others have given up.
            if self._store.compare_set(f"{self._number}/outcome", "", outcome).decode() == "met":
                return [int(answer) for answer in self._store.multi_get(keys)]
        return None

    def _look(self, answer: int) -> None:
        assert self._store is not None
        key = str(self._number)
        if self._store.check([key]):
            self.reason = int(self._store.get(key))
            self._store.set(f"{self._number}/{self._rank}", str(answer))
            if answer == NOWHERE:
                self._number += 1
            else:
                self._answer = answer

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # The store is gone, and the other ranks with it.
            while not self._over.wait(PAUSE_INTERVAL):
                with self._lock:
                    if self._answer is None:
                        self._look(self._done + 1 if NOWHERE < self._done < self._steps else NOWHERE)
