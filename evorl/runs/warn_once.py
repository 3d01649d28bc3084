"""Warnings for persistent conditions, such as a full disk: once, and again only after the condition has cleared."""

from __future__ import annotations

import warnings

from evorl.types import EvorlWarning


class WarnOnce:
    """Warns once per subject until the subject is reset. Silent unless `speaks`: another process then warns."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._reported: set[str] = set()

    def __call__(self, subject: str, message: str) -> None:
        """Warn, unless this subject has been reported since its last reset."""
        if self._speaks and subject not in self._reported:
            self._reported.add(subject)
            warnings.warn(message, EvorlWarning, stacklevel=2)

    def reset(self, subject: str) -> None:
        """Clear the subject, so that its next occurrence is reported again."""
        self._reported.discard(subject)
