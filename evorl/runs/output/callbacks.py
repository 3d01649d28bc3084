"""Callbacks: user functions called after each generation, which can log further metrics and stop the run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evorl.types.agents import Agent
from evorl.types.messages import shown
from evorl.types.outcomes import UserError

LOGGED = "logged"
"""The key of a `metrics.jsonl` line that holds the values logged by callbacks."""


@dataclass(frozen=True)
class Stop:
    """Returned by a callback to stop the run: cleanly, on all ranks, after the generation's checkpoint."""

    reason: str = "a callback asked for it"


class Generation:
    """An evaluated generation, passed to callbacks on the main process.

    `number` counts from 1. `row` is its line of `metrics.jsonl`, `agents` are the trained agents with their fitness,
    before selection and mutation. Both are copies: modifying them does not affect the run.
    """

    def __init__(self, row: Mapping[str, Any], agents: Sequence[Agent]) -> None:
        self.number: int = row["generation"]
        self._row = row
        self._agents = agents
        self.logged: dict[str, float | None] = {}
        """The logged scalars by name; None for those that were not finite."""

    @cached_property
    def row(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self._row))

    @cached_property
    def agents(self) -> tuple[Agent, ...]:
        return tuple(copy.deepcopy(agent) for agent in self._agents)

    def log(self, name: str, value: float) -> None:
        """Log a scalar for this generation, in `metrics.jsonl` and, as `callbacks/NAME`, in the trackers.

        In `metrics.jsonl` it is under `logged`, as null if it is not finite. Raises UserError if `value` is not a
        number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"callbacks: {name} is logged as {shown(value)}, which is not a number") from error
        self.logged[name] = number if math.isfinite(number) else None


Callback = Callable[[Generation], Stop | None]
"""Called on the main process once per generation; the other ranks wait for up to `run.timeout` seconds."""


def call_each(
    callbacks: Sequence[Callback], row: Mapping[str, Any], agents: Sequence[Agent]
) -> tuple[dict[str, float | None], Stop | None]:
    """Call all callbacks; return their logged values and the first Stop, or None.

    Raises UserError if a callback returns anything other than a Stop or None.
    """
    logged: dict[str, float | None] = {}
    stop: Stop | None = None
    for callback in callbacks:
        generation = Generation(row, agents)
        answer: object = callback(generation)
        name = getattr(callback, "__name__", type(callback).__name__)
        if not isinstance(answer, Stop | None):
            raise UserError(f"callbacks: {name} returned {shown(answer)}; return evorl.Stop(reason), or nothing")
        if answer is not None and not isinstance(answer.reason, str):
            raise UserError(f"callbacks: {name} stops because of {shown(answer.reason)}, which is not a string")
        logged |= generation.logged
        stop = stop or answer
    return logged, stop
