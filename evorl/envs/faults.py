"""Errors that an environment raises: how a step or reset reports them, and how its episodes restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from evorl.envs.continuation import another_seed
from evorl.system.console import say
from evorl.system.plugins import place, without_place
from evorl.types import UserError

Began = TypeVar("Began")
FAULT, PLACE, FAILURES, FIRST = "evorl.fault", "evorl.place", "evorl.failures", "evorl.first"
"""Info keys of a step or reset in which an environment raised: the last error, the user's source lines that led to it,
the number of errors, and `reset` or `step` if the first call of that kind raises reproducibly."""
PASSED_ON = (UserError, KeyboardInterrupt, SystemExit)
"""Exceptions that end the run wherever an environment raises them. Any other is a fault of that environment, also one
that is no Exception, as of a panic in Rust."""


def end_if_forked(process: int, name: str) -> None:
    """End this process if it is a fork of `process` that came back from the environment: it would train the run too."""
    if os.getpid() != process:
        say(f"error: environment.id: {name} forked a process that did not end in its call, and is ended; use os._exit")
        os._exit(1)


def restart(
    error: BaseException, restarts: int, seed: int, begin_anew: Callable[[int], Began]
) -> tuple[BaseException, int, Began | None]:
    """Begin new episodes after an `error`, with one new seed after another until nothing is raised.

    Returns the last error, the number of errors, and what `begin_anew(seed)` returned: None after `restarts` attempts
    that raised. One of PASSED_ON propagates.
    """
    failures = 1
    while failures <= restarts:
        seed = another_seed(seed)
        try:
            return error, failures, begin_anew(seed)
        except PASSED_ON:
            raise
        except BaseException as another:
            error, failures = another, failures + 1
    return error, failures, None


def fault(error: BaseException, failures: int) -> dict[str, Any]:
    """The info entries of a step or reset in which an environment raised."""
    return {FAULT: without_place(error), PLACE: place(error), FAILURES: failures}
