"""Counts the faults of environment copies and reports them by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.envs.guard import FAILURES, FAULT, FIRST, PLACE
from evorl.types import EvorlWarning, UserError


class Watch:
    """Failure counts of N copies, `num_envs` per agent, and the current step of each episode."""

    def __init__(self, id: str, copies: int, num_envs: int, restarts: int) -> None:
        self._id = id
        self._num_envs = num_envs
        self._restarts = restarts
        self._failures = np.zeros(copies, dtype=np.int64)
        self._clock = 0
        self._began = np.zeros(copies, dtype=np.int64)
        self._reported_places: set[str] = set()

    def tick(self) -> None:
        """Advance the step count of all copies."""
        self._clock += 1

    def begin(self, copies: NDArray[np.bool_] | slice) -> None:
        """Mark the start of an episode in these copies."""
        self._began[copies] = self._clock

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return the steps [N] of each copy's running episode."""
        return self._clock - self._began

    @steps.setter
    def steps(self, steps: NDArray[np.int64]) -> None:
        self._began = self._clock - steps

    def faulty(self, info: dict[str, Any]) -> NDArray[np.bool_]:
        """Return a mask [N] of the copies that raised, and report them, once per place in the user's code.

        Raises UserError if a copy raised too often, or if its first reset or step raises reproducibly.
        """
        faulty = np.asarray(info[f"_{FAULT}"], dtype=bool)
        self._failures += np.where(faulty, info[FAILURES], 0)
        at_first = np.asarray(info.get(f"_{FIRST}", False))
        beyond = self._failures > self._restarts
        copies = np.flatnonzero(at_first if at_first.any() else beyond if beyond.any() else faulty)
        what, place = f"{self.names(copies)} raised {info[FAULT][copies[0]]}", str(info[PLACE][copies[0]])
        if at_first.any():
            first = f"in its first {info[FIRST][copies[0]]}, and again when it was made anew with the same seed"
            raise UserError(f"environment.id: {what}{place} {first}")
        if beyond.any():
            raise UserError(
                f"environment.max_restarts: {what}{place}; after {self._restarts} restarts, which is all that each may "
                "have"
            )
        shown = "" if place in self._reported_places else place
        self._reported_places.add(place)
        warnings.warn(f"{what}{shown}; restarted; an episode that had not ended is dropped", EvorlWarning, stacklevel=4)
        return faulty

    def check_finite(self, values: NDArray[Any], what: str, copy: int | None = None) -> None:
        """Raise UserError if any of the values [N, ...], or [...] of one `copy`, is NaN or infinite."""
        # Squares cannot cancel, and their sum takes a fifth of the time of an elementwise check. If it overflows, the
        # elementwise check decides.
        if math.isfinite(np.vdot(values, values)):
            return
        finite = np.isfinite(values)
        if finite.all():
            return
        if copy is None:
            copy = int(np.flatnonzero(~finite.reshape(len(values), -1).all(1))[0])
        raise UserError(
            f"environment.id: {self.names(np.array([copy]))} gave {values[~finite][0]} {what}; rewards and "
            "observations must be finite in single precision"
        )

    def check_choices(self, values: NDArray[Any], sizes: Sequence[int], what: str, copy: int | None = None) -> None:
        """Raise UserError if any of the integers [N, ...], or [...] of one `copy`, is out of its category range."""
        rows = values.reshape(-1, len(sizes))
        outside = ((rows < 0) | (rows >= np.asarray(sizes))).any(1)
        if not outside.any():
            return
        row = int(np.flatnonzero(outside)[0])
        place = self.names(np.array([row if copy is None else copy]))
        raise UserError(
            f"environment.id: {place} gave {rows[row].tolist()} {what}; "
            f"its space has 0 to {[size - 1 for size in sizes]} (before its `start` is added)"
        )

    def names(self, copies: NDArray[np.int64]) -> str:
        """Return a description of these environments, with agent, index and episode step of the first."""
        agent, place = divmod(int(copies[0]), self._num_envs)
        step = self._clock - self._began[copies[0]]
        others = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
        return f"environment {place} of agent {agent}{others} ({self._id}, step {step} of the episode)"
