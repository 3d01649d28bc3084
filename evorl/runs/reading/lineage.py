"""The lineage of a run's elite: its ancestor in each generation, and the mutations in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from evorl.runs.storage.directory import LINEAGE, METRICS, load_elite
from evorl.runs.storage.json_lines import JsonLines, Row
from evorl.system.console import aligned, digits
from evorl.types.agents import Architecture, Measured, Mutation, Number, Words
from evorl.types.messages import on_one_line, shown
from evorl.types.outcomes import UserError


@dataclass(frozen=True)
class Stage:
    """The ancestor that trained in one generation, as recorded in a line of `lineage.jsonl`.

    `mutation` produced it from the agent of the previous stage, or is a no-op if that is the same agent.
    """

    generation: Number
    id: Number
    parent: Number | None
    parent_generation: Number | None
    mutation: Mutation
    hyperparameters: Annotated[dict[Words, Measured], Field(max_length=100)]
    architectures: Annotated[dict[Words, Architecture], Field(max_length=100)]
    fitness: Measured | None = None


LINE = TypeAdapter(Stage)
SAME = Mutation("none", "the same agent")
Key = tuple[int | None, int | None]
"""The generation and agent id that identify a line."""


def ancestry(run: Path) -> list[Stage]:
    """The lineage of the elite of the run in directory `run`, starting at an agent of the initial population.

    Raises UserError if `lineage.jsonl` does not trace back to an initial agent.
    """
    _, elite = load_elite(run)
    last = JsonLines(run / METRICS).last() or {}
    generation = last.get("elite_generation")
    stages = list(ancestors(run, generation if isinstance(generation, int) else None, elite.id))[::-1]
    later = (replace(stage, mutation=SAME) if stage.id == before.id else stage for before, stage in pairwise(stages))
    return [stages[0], *later]


def ancestors(run: Path, generation: int | None, agent: int | None) -> Iterator[Stage]:
    """Iterate over an agent's line of descent, from the given generation back to the first.

    Raises UserError where `lineage.jsonl` lacks one.
    """
    path, stage = run / LINEAGE, None
    keys: list[Key] = [(generation, agent)]
    for row in JsonLines(path).backwards():
        if (row["generation"], row.get("id")) in keys:
            stage = stage_of(row, path)
            if stage.parent_generation is not None and stage.parent_generation >= stage.generation:
                raise UserError(f"{path}: agent {stage.id} has no parent of an earlier generation")
            yield stage
            # The agent itself if it lived then; else it was born of its parent.
            keys = [(stage.generation - 1, stage.id), (stage.parent_generation, stage.parent)]
    if stage is None or stage.parent is not None:
        raise UserError(f"{path}: has no line for agent {keys[-1][1]} in generation {keys[-1][0]}")


def stage_of(row: Row, path: Path) -> Stage:
    """Validate a line of the lineage in the file `path`. Raises UserError."""
    try:
        return LINE.validate_python({name: row[name] for name in Stage.__dataclass_fields__})
    except (ValidationError, KeyError) as error:
        where = f"{path}: agent {shown(row.get('id'))} in generation {shown(row['generation'])}"
        raise UserError(f"{where}: cannot be read: {on_one_line(str(error))[:200]}") from error


def changing(stages: Sequence[Stage]) -> list[str]:
    """The names of the hyperparameters in which stages differ, also those that only some of them have."""
    names = dict.fromkeys(name for stage in stages for name in stage.hyperparameters)
    return [name for name in names if len({stage.hyperparameters.get(name) for stage in stages}) > 1]


def table(stages: Sequence[Stage], use: Callable[[str, float], float]) -> list[str]:
    """The stages as a text table: the mutation, and the hyperparameters that ever changed.

    `use` converts stored hyperparameters to the values training uses.
    """
    names = changing(stages)
    rows = [("generation", "agent", "fitness", *names, "what changed")]
    for stage in stages:
        fitness = "-" if stage.fitness is None else digits(stage.fitness)
        values = (f"{use(name, stage.hyperparameters.get(name, math.nan)):.4g}" for name in names)
        changed = "" if stage.mutation == SAME else on_one_line(str(stage.mutation.with_effective_values(use)))
        rows.append((str(stage.generation), str(stage.id), fitness, *values, changed))
    return aligned(rows)
