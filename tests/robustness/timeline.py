"""Train as demos/online.py does and leave word, in memory that others see, of every phase as it is entered."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evorl.runs.program import run_program
from evorl.system.stopwatch import Stopwatch

ROOT = Path(__file__).parent.parent.parent
PHASES = ("start", "collection", "learning", "evaluation", "evolution", "checkpoint", "between")
PHASE_OF = {
    "acting": "collection",
    "environments": "collection",
    "sampling": "collection",
    "learning": "learning",
    "evaluation": "evaluation",
    "evolution": "evolution",
    "checkpoint": "checkpoint",
}
MAX_RANKS, MAX_EVENTS = 2, 2**14
EVENT = np.dtype([("at", np.float64), ("phase", np.int64)])
RANK = np.dtype([("pid", np.int64), ("phase", np.int64), ("count", np.int64), ("events", EVENT, (MAX_EVENTS,))])
"""One rank: its process, the phase that it is in, and the phases that it has entered, the first being its start."""


class Timeline:
    """A file that the ranks of a launch and whoever watches them share."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self._rows: Any = np.memmap(path, RANK, "w+" if fresh else "r+", shape=(MAX_RANKS,))

    def pids(self, ranks: int) -> list[int]:
        """Return the process of each rank that has started."""
        return [int(pid) for pid in self._rows["pid"][:ranks] if pid]

    def count(self, rank: int) -> int:
        """Return how many phases a rank has entered."""
        return int(self._rows["count"][rank])

    def phase(self, rank: int) -> str:
        return PHASES[int(self._rows["phase"][rank])]

    def events(self, rank: int) -> tuple[list[float], list[str]]:
        """Return when a rank entered each phase, and which it was."""
        events = self._rows["events"][rank][: self.count(rank)]
        return events["at"].tolist(), [PHASES[phase] for phase in events["phase"]]

    def begin(self, rank: int) -> None:
        """Start the row of a rank, which is this process, anew."""
        self._rows["count"][rank] = 0
        self.enter(rank, "start")
        self._rows["pid"][rank] = os.getpid()

    def enter(self, rank: int, phase: str) -> None:
        count = self.count(rank)
        self._rows["events"][rank][count] = (time.monotonic(), PHASES.index(phase))
        self._rows["count"][rank] = count + 1
        self.leave(rank, phase)

    def leave(self, rank: int, outer: str) -> None:
        """Return to the phase around the one that has ended."""
        self._rows["phase"][rank] = PHASES.index(outer)


@dataclass(frozen=True)
class Undisturbed:
    """The course of a run that is left alone: the seconds from its start at which phases were entered and it ended.

    `begins` has for each number of complete generations the event with which the next one begins.
    """

    at: Sequence[float]
    ended: float
    begins: Sequence[int]

    @classmethod
    def of(cls, timeline: Timeline, ended: float) -> Undisturbed:
        """Read the course of rank 0."""
        at, phases = timeline.events(0)
        checkpoints = [event for event, phase in enumerate(phases) if phase == "checkpoint"]
        return cls([when - at[0] for when in at], ended - at[0], [1, *(event + 1 for event in checkpoints)])

    def moment(self, complete: int, share: float) -> tuple[int, float]:
        """Return a moment by its share of the time that a process takes which begins after so many generations.

        It is given as an event of that process, and the seconds after it, which do not depend on how fast it runs.
        """
        first = min(self.begins[complete], len(self.at))
        skipped = (self.at[first] if first < len(self.at) else self.at[-1]) - self.at[1]
        at = [0.0, *(when - skipped for when in self.at[first:])]
        spans = [end - begin for begin, end in pairwise([*at, self.ended - skipped])]
        delay, event = share * sum(spans), 0
        while delay >= spans[event] and event < len(spans) - 1:
            delay -= spans[event]
            event += 1
        return event, delay


def train(main: Callable[[Sequence[str]], object], timeline: Timeline, arguments: Sequence[str]) -> int:
    """Train in this process, one of the launch's ranks, and return the exit code."""
    rank, measure = int(os.environ.get("RANK", "0")), Stopwatch.__call__
    outer = ["between"]

    @contextlib.contextmanager
    def timed(self: Stopwatch, name: str) -> Iterator[None]:
        outer.append(PHASE_OF.get(name, outer[-1]))
        timeline.enter(rank, outer[-1])
        with measure(self, name):
            yield
        outer.pop()
        timeline.leave(rank, outer[-1])

    Stopwatch.__call__ = timed  # type: ignore[method-assign]
    timeline.begin(rank)
    return run_program(main, arguments)
