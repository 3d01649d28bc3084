"""The schema of a `metrics.jsonl` line for reports. The file may be untrusted, so types and sizes are validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from evorl.runs.elite import Measured

Count = Annotated[int, Field(ge=0, le=10**15)]


@dataclass(frozen=True)
class Generation:
    """The fields of a `metrics.jsonl` line that reports use."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    generation: Count
    agent_steps: Count
    global_steps: Count = 0
    wall_clock_seconds: Measured = 0.0
    ranks: Count = 1
    placement: str = ""
    env_steps_per_second: Measured = 0.0
    best_fitness: Measured | None = None
    mean_fitness: Measured | None = None
    elite_fitness: Measured | None = None
    elite_std: Measured | None = None
    elite_episodes: Count = 0
    elite_generation: Count | None = None
    seconds: dict[str, Measured] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)


GENERATION = TypeAdapter(Generation)
