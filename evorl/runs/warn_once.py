"""Warnings of what lasts, such as a full disk: given once, and again after it was over."""

from __future__ import annotations

import warnings

from evorl.types import EvorlWarning


class WarnOnce:
    """Warns of each subject once until that is reset. A process that is not to `speak` leaves it to another."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._reported: set[str] = set()

    def __call__(self, subject: str, message: str) -> None:
        """Warn, if nothing was reported of this subject yet."""
        if self._speaks and subject not in self._reported:
            self._reported.add(subject)
            warnings.warn(message, EvorlWarning, stacklevel=2)

    def reset(self, subject: str) -> None:
        """Let the next trouble of this subject be reported again."""
        self._reported.discard(subject)
