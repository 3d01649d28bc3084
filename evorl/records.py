"""Records of mutations: the changes of an agent from its parent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field

Words = Annotated[str, Field(max_length=1_000)]


class Change(NamedTuple):
    """One change of an agent: its `target`, such as a hyperparameter, and its value before and after."""

    target: str = ""
    before: int | float | str | None = None
    after: int | float | str | None = None


@dataclass(frozen=True)
class Mutation:
    """The mutation of an agent at birth: its `kind`, its `target`, and the value before and after."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    kind: Words
    target: Words = ""
    before: int | float | Words | None = None
    after: int | float | Words | None = None

    def as_used(self, use: Callable[[str, float], float]) -> Mutation:
        """Return the mutation with hyperparameter values as training uses them, converted by `use(name, value)`."""
        if self.kind != "hyperparameters":
            return self
        before, after = (
            use(self.target, value) if isinstance(value, int | float) else value for value in (self.before, self.after)
        )
        return replace(self, before=before, after=after)

    def __str__(self) -> str:
        ends = [_shown(value) for value in (self.before, self.after) if value is not None]
        detail = ": ".join(part for part in (self.target, " -> ".join(ends)) if part)
        return f"{self.kind} ({detail})" if detail else self.kind


def _shown(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


INITIAL = Mutation("initial")
RESTORED = Mutation("none", "archive")
"""The mutation record of an archived elite restored to the population unchanged."""
