"""The `replay` section: replay capacity, sampling and n-step windows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from evorl.config.fields import Count, Fraction, Positive, Section


class ImportanceExponent(Section):
    """The exponent of importance weights goes linearly from `start` to `end`."""

    start: Fraction = 0.4
    """Its value at first."""
    end: Fraction = 1.0
    """Its value in the end."""
    steps: Count | None = None
    """Environment steps of each agent, over all ranks, after which it is at its end; null is training.max_steps."""


class Prioritised(Section):
    """Prioritised replay, in proportion to errors (arXiv 1511.05952); its defaults are the paper's."""

    exponent: Fraction = 0.6
    """Priorities are (|error| + epsilon) to this power; 0 draws all alike."""
    importance_exponent: ImportanceExponent = ImportanceExponent()
    epsilon: Positive = 1e-6
    """What is added to each error, so that all transitions can be drawn."""


class Replay(Section):
    """The replay of algorithms that learn from one; the others have none."""

    capacity: Annotated[int, Field(ge=1, le=10**9)] = 100_000
    """Transitions kept, over all ranks and agents."""
    learning_starts: Annotated[int, Field(ge=0, le=10**9)] = 1_000
    """Transitions held, over all ranks and agents, before learning starts."""
    n_step: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Steps of an n-step return (arXiv 1710.02298). Fewer where the episode ends, or where no more are there yet."""
    prioritised: Prioritised | None = None
    """Without it all transitions are equally likely."""
    shared: bool = True
    """All agents learn from all transitions. Without it an agent learns only from what it or an ancestor has done, and
    `capacity` is divided among the agents."""
