"""The update schedule. Axes: P agents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class UpdateSchedule:
    """One update of an agent per `learn_step` [P] of its environment steps, exact for any chunking of the steps.

    `debt` [P] is the fraction of an update already earned, between 0 and 1.
    """

    def __init__(self, learn_step: NDArray[np.float64], debt: NDArray[np.float64]) -> None:
        self._learn_step = learn_step
        self._debt = np.clip(debt, 0.0, 1.0)  # A checkpoint file may hold a value out of range.
        self._steps = np.zeros_like(learn_step)
        self._done = np.zeros(len(learn_step), dtype=np.int64)

    def due(self, steps: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the updates [P] that become due after `steps` [P] more environment steps."""
        self._steps += steps
        # Computed from the total, not incrementally: 3 * (8 / 3) must make 8 updates, not 7.
        earned = self._earned()
        due = earned - self._done
        self._done = earned
        return due

    @property
    def steps(self) -> NDArray[np.float64]:
        """The environment steps [P] so far."""
        return self._steps

    def resume(self, steps: NDArray[np.float64]) -> None:
        """Continue after `steps` [P], whose updates have been done."""
        self._steps = steps.copy()
        self._done = self._earned()

    def _earned(self) -> NDArray[np.int64]:
        return np.floor(self._steps / self._learn_step + self._debt + 1e-9).astype(np.int64)

    def debt(self) -> NDArray[np.float64]:
        """Return the fraction of an update [P] earned but not yet due."""
        return np.maximum(self._steps / self._learn_step + self._debt - self._done, 0.0)
