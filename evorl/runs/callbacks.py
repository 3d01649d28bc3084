"""Callbacks: functions of a user's own that hear of each generation, log further numbers, and may stop the run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evorl.config.errors import shown
from evorl.types import Agent, UserError

LOGGED = "logged"
"""The key of a generation's line under which numbers of callbacks stand."""


@dataclass(frozen=True)
class Stop:
    """Ends the run when a callback returns it: in order and on all ranks, after the generation's checkpoint."""

    reason: str = "a callback asked for it"


class Generation:
    """A generation that has been evaluated, as a callback sees it.

    `number` is its own, from 1. `row` is its line of `metrics.jsonl`, `agents` are the trained agents with their
    fitness, before any of them is selected or mutated. Both are copies: to change them changes nothing of the run.
    """

    def __init__(self, row: Mapping[str, Any], agents: Sequence[Agent]) -> None:
        self.number: int = row["generation"]
        self._row = row
        self._agents = agents
        self._logged: dict[str, float | None] = {}

    @cached_property
    def row(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self._row))

    @cached_property
    def agents(self) -> tuple[Agent, ...]:
        return tuple(copy.deepcopy(agent) for agent in self._agents)

    def log(self, name: str, value: float) -> None:
        """Add a number to this generation's line and to the trackers' charts, there as `callbacks/NAME`.

        It stands under `logged` in the line, as null where it is not finite. Raises UserError for what is no number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise UserError(f"callbacks: {name} is logged as {shown(value)}, which is no number") from error
        self._logged[name] = number if math.isfinite(number) else None

    @property
    def logged(self) -> dict[str, float | None]:
        """Return the numbers that were logged."""
        return dict(self._logged)


Callback = Callable[[Generation], Stop | None]
"""Called on the main process, once for each generation, while the other ranks wait up to `run.timeout` seconds."""


def call_each(
    callbacks: Sequence[Callback], row: Mapping[str, Any], agents: Sequence[Agent]
) -> tuple[dict[str, float | None], Stop | None]:
    """Return what callbacks logged of a generation, and the first request to stop, if any.

    Raises UserError for a callback that returns anything else.
    """
    logged: dict[str, float | None] = {}
    stop: Stop | None = None
    for callback in callbacks:
        generation = Generation(row, agents)
        answer: object = callback(generation)
        if not isinstance(answer, Stop | None):
            name = getattr(callback, "__name__", type(callback).__name__)
            raise UserError(f"callbacks: {name} returned {shown(answer)}; return evorl.Stop(reason), or nothing")
        logged |= generation.logged
        stop = stop or answer
    return logged, stop
