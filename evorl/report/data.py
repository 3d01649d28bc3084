"""A run as reports draw it. Its files may be a stranger's, so types and sizes are checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evorl.config.errors import on_one_line
from evorl.runs.ancestry import LINE, Stage
from evorl.runs.read import RunRecord, read_run
from evorl.types import UserError

MAX_LIVES = 100_000
"""Lines of a lineage that a report draws."""
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]


@dataclass(frozen=True)
class Generation:
    """A line of `metrics.jsonl`, as far as reports show it."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    generation: Count
    agent_steps: Count
    global_steps: Count = 0
    wall_clock_seconds: Number = 0.0
    ranks: Count = 1
    placement: str = ""
    env_steps_per_second: Number = 0.0
    best_fitness: Number | None = None
    mean_fitness: Number | None = None
    elite_fitness: Number | None = None
    elite_std: Number | None = None
    elite_episodes: Count = 0
    elite_generation: Count | None = None
    seconds: dict[str, Number] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)


GENERATION = TypeAdapter(Generation)


@dataclass(frozen=True)
class Drawn:
    """A run: its generations, what each agent was in each of them, and the ancestors of its best agent."""

    name: str
    config: dict[str, Any]
    generations: Sequence[Generation]
    lives: Sequence[Stage]
    winner: Sequence[Stage]
    summary: dict[str, Any]

    @property
    def steps(self) -> dict[int, int]:
        """Return the environment steps of each agent at the end of each generation."""
        return {row.generation: row.agent_steps for row in self.generations}

    def parents(self) -> dict[tuple[int, int], Stage]:
        """Return by (generation, agent) what each agent was made from: itself a generation earlier, or its parent."""
        known = {(life.generation, life.id): life for life in self.lives}
        found = {}
        for life in self.lives:
            before = known.get((life.generation - 1, life.id))
            if before is None and life.parent is not None and life.parent_generation is not None:
                before = known.get((life.parent_generation, life.parent))
            if before is not None and before.generation < life.generation:
                found[life.generation, life.id] = before
        return found

    def setting(self, path: str) -> Any:
        """Return a setting by its path, such as `environment.id`; none where there is no such setting."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def load(path: Path) -> Drawn:
    """Return the run in directory `path`. Raises UserError where there is none, or none that can be drawn."""
    record = read_run(path)
    if not record.metrics or not record.lineage:
        raise UserError(f"{path}: no generation has ended yet, so there is nothing to draw")
    if len(record.lineage) > MAX_LIVES:
        raise UserError(f"{path}: a report has room for {MAX_LIVES:,} lines of a lineage, and this has more")
    try:
        generations = [GENERATION.validate_python(row) for row in record.metrics]
        lives = [
            LINE.validate_python({name: row[name] for name in Stage.__dataclass_fields__}) for row in record.lineage
        ]
    except (ValidationError, KeyError) as error:
        raise UserError(f"{path}: its metrics or lineage cannot be read: {on_one_line(str(error))[:200]}") from error
    counted = {row.generation for row in generations}
    lives = [life for life in lives if life.generation in counted]
    drawn = Drawn(path.resolve().name, record.config, generations, lives, (), record.summary)
    return Drawn(drawn.name, record.config, generations, lives, _winner(drawn, record), record.summary)


def born_by(life: Stage, parent: Stage | None) -> str:
    """Return the kind of mutation that a life begins with; `none` where it is that of the same agent as before."""
    return "none" if parent is not None and parent.id == life.id else life.mutation.kind


def _winner(drawn: Drawn, record: RunRecord) -> list[Stage]:
    """Return the ancestors of the elite and itself, from the first on."""
    known = {(life.generation, life.id): life for life in drawn.lives}
    parents = drawn.parents()
    life = known.get((drawn.generations[-1].elite_generation or 0, record.elite.get("id", -1)))
    path: list[Stage] = []
    while life is not None:
        path.append(life)
        life = parents.get((life.generation, life.id))
    return path[::-1]
