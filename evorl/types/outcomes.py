"""The ends of runs, errors for users and warnings."""

from __future__ import annotations

FINISHED, STOPPED = "finished", "stopped"
"""Ends of a run that saved its last checkpoint: at its target or last step, or stopped by a callback."""


class UserError(Exception):
    """An error that the user can fix: programs print it as one line and exit with code 2.

    If all ranks raise it together, `reported_elsewhere` says whether another rank prints it. None means that only this
    rank knows of it.
    """

    def __init__(self, message: str, reported_elsewhere: bool | None = None) -> None:
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


class EnvironmentRaised(UserError):
    """An exception of the user's environment in a reset or a step; readers of checkpoints pass it on as it is."""


class RunFailed(RuntimeError):
    """A run failed without an error of the user: programs print it as one line and exit with code 1."""


class EvorlWarning(UserWarning):
    """A warning for the user; the run continues."""
