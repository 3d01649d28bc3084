"""The ancestry of a run's best agent: what it was in each generation, and what changed in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from evorl.algorithms import SETTINGS
from evorl.config import AnyConfig, Schedule, ScheduledMutation, validate
from evorl.config.errors import on_one_line
from evorl.records import Mutation, Words
from evorl.runs.directory import load_elite
from evorl.runs.elite import Measured, Number
from evorl.runs.history import JsonLines, Row
from evorl.system.console import aligned, digits
from evorl.types import Architecture, UserError


@dataclass(frozen=True)
class Stage:
    """The ancestor that learned in one generation, as a line of `lineage.jsonl` has it.

    `mutation` made it from the agent of the stage before; where that is the same agent, it is nothing.
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
STEPS = TypeAdapter(Number)
SAME = Mutation("none", "the same agent")
Key = tuple[int | None, int | None]
"""The generation and the identity that a line is looked up by."""


def ancestry(run: Path) -> list[Stage]:
    """Return the stages of the best agent of the run in directory `run`, the first being an initial agent.

    Raises UserError where the run's lineage does not lead there.
    """
    _, elite = load_elite(run)
    last = JsonLines(run / "metrics.jsonl").last() or {}
    generation = last.get("elite_generation")
    key: Key = generation if isinstance(generation, int) else None, elite.id
    search = _Search(JsonLines(run / "lineage.jsonl"))
    stage = _stage(run, search.first(key), key)
    stages: list[Stage] = []
    while True:
        key = stage.parent_generation, stage.parent
        if stage.parent_generation is not None and stage.parent_generation >= stage.generation:
            raise UserError(f"{run / 'lineage.jsonl'}: agent {stage.id} has no parent of an earlier generation")
        before, parent = search.before(stage)
        stages.append(replace(stage, mutation=SAME) if before is not None else stage)
        if before is None and stage.parent is None:
            return stages[::-1]
        stage = _stage(run, before or parent, (stage.generation - 1, stage.id) if before else key)


class _Search:
    """The lines of an agent's ancestors, found in one pass from the lineage's end to its beginning."""

    def __init__(self, lineage: JsonLines) -> None:
        self._rows = lineage.backwards()
        self._next: Row | None = None

    def first(self, key: Key) -> Row | None:
        """Return the line of an agent."""
        return next((row for row in self._rows if (row["generation"], row.get("id")) == key), None)

    def before(self, stage: Stage) -> tuple[Row | None, Row | None]:
        """Return the lines of an agent a generation earlier and, where it was not yet there, of its parent."""
        parent = None
        while (row := self._next or next(self._rows, None)) is not None:
            self._next = None
            key = row["generation"], row.get("id")
            if key == (stage.generation - 1, stage.id):
                return row, None
            if row["generation"] < stage.generation - 1 and (parent is not None or stage.parent is None):
                self._next = row
                break
            if parent is None and key == (stage.parent_generation, stage.parent):
                parent = row
        return None, parent


def _stage(run: Path, row: Any, key: Key) -> Stage:
    if row is None:
        raise UserError(f"{run / 'lineage.jsonl'}: says nothing of agent {key[1]} in generation {key[0]}")
    try:
        return LINE.validate_python({name: row[name] for name in Stage.__dataclass_fields__})
    except (ValidationError, KeyError) as error:
        where = f"{run / 'lineage.jsonl'}: agent {key[1]} in generation {key[0]}"
        raise UserError(f"{where}: cannot be read: {on_one_line(str(error))[:200]}") from error


def schedule_of(stages: Sequence[Stage]) -> Schedule:
    """Return the schedule that leads an agent through these stages."""
    mutations = [
        ScheduledMutation(generation=place, kind=kind, target=one.target, before=one.before, after=one.after)
        for place, one in enumerate(stage.mutation for stage in stages)
        if place and (kind := one.kind) != "none"
    ]
    first = stages[0]
    return Schedule(
        hyperparameters=first.hyperparameters, architectures=first.architectures, mutations=tuple(mutations)
    )


def constant_schedule_of(stages: Sequence[Stage]) -> Schedule:
    """Return the schedule of an agent that has the last stage's settings from the beginning."""
    last = stages[-1]
    return Schedule(hyperparameters=last.hyperparameters, architectures=last.architectures)


def replayed(config: AnyConfig, run: Path, stages: Sequence[Stage], constant: bool) -> AnyConfig:
    """Return the configuration of a run in which one agent follows the stages, or has the last one's settings."""
    schedule = (constant_schedule_of if constant else schedule_of)(stages)
    training: dict[str, int | None] = {"target_fitness": None}
    # What falls with training.max_steps shall fall as it did for the winner.
    if "training.max_steps" not in config.algorithm.frozen_on_resume and config.replay.prioritised is None:
        training["max_steps"] = _steps(run, stages)
    selection = config.evolution.selection.model_copy(update={"name": "none"})
    evolution = {"schedule": schedule, "initial": "configured", "selection": selection}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": None, "resume": "never", "directory": run.parent.absolute()}),
            "population": config.population.model_copy(update={"size": 1, "placement": "replicated"}),
            "evolution": config.evolution.model_copy(update=evolution),
            "training": config.training.model_copy(update=training),
        }
    )


def _steps(run: Path, stages: Sequence[Stage]) -> int:
    """Return steps that an agent reaches in as many generations as there are stages.

    Steps that an environment spends on resets are not counted, so generations differ, and the last one may be shorter.
    """
    path = run / "metrics.jsonl"
    try:
        rows = JsonLines(path).members("agent_steps")
        reached = {row["generation"]: STEPS.validate_python(row.get("agent_steps")) for row in rows}
        own = [reached[stage.generation] - reached.get(stage.generation - 1, 0) for stage in stages]
    except (ValidationError, KeyError) as error:
        raise UserError(f"{path}: does not say how many steps each generation of the best agent had") from error
    return sum(own)


def reader_of(data: Mapping[str, Any]) -> Callable[[str, float], float]:
    """Return what gives hyperparameters as training uses them, by a run's configuration.

    Numbers stay as they are where that cannot be read, as of an algorithm that is not installed here.
    """
    try:
        return validate(data, SETTINGS).as_used
    except UserError:
        return lambda name, value: value


def table(stages: Sequence[Stage], use: Callable[[str, float], float]) -> list[str]:
    """Return the stages as lines of text: what changed, and the hyperparameters that ever did, as `use` gives them."""
    names = [
        name for name in stages[0].hyperparameters if len({stage.hyperparameters.get(name) for stage in stages}) > 1
    ]
    rows = [("generation", "agent", "fitness", *names, "what changed")]
    for stage in stages:
        fitness = "-" if stage.fitness is None else digits(stage.fitness)
        values = (f"{use(name, stage.hyperparameters.get(name, math.nan)):.4g}" for name in names)
        changed = "" if stage.mutation == SAME else on_one_line(str(stage.mutation.as_used(use)))
        rows.append((str(stage.generation), str(stage.id), fitness, *values, changed))
    return aligned(rows)
