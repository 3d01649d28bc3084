"""Errors that an environment raises: how a step or reset reports them, and how its episodes restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from evorl.envs.continuation import another_seed
from evorl.system.plugins import place, without_place
from evorl.types import UserError

Began = TypeVar("Began")
FAULT, PLACE, FAILURES, FIRST = "evorl.fault", "evorl.place", "evorl.failures", "evorl.first"
"""Info keys of a step or reset in which an environment raised: the last error, the user's source lines that led to it,
the number of errors, and `reset` or `step` if the first call of that kind raises reproducibly."""


def restart(
    error: Exception, restarts: int, seed: int, begin_anew: Callable[[int], Began]
) -> tuple[Exception, int, Began | None]:
    """Begin new episodes after an `error`, with one new seed after another until nothing is raised.

    Returns the last error, the number of errors, and what `begin_anew(seed)` returned: None after `restarts` attempts
    that raised. A UserError propagates.
    """
    failures = 1
    while failures <= restarts:
        seed = another_seed(seed)
        try:
            return error, failures, begin_anew(seed)
        except UserError:
            raise
        except Exception as another:
            error, failures = another, failures + 1
    return error, failures, None


def fault(error: Exception, failures: int) -> dict[str, Any]:
    """The info entries of a step or reset in which an environment raised."""
    return {FAULT: without_place(error), PLACE: place(error), FAILURES: failures}
