"""Reading a run's files, including those of a run still in training. Axes: G generations, N rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from evorl.config.errors import shown
from evorl.runs.directory import ELITE_FACTS, LINEAGE, METRICS, MOST_RESUMES, from_here, saved_settings
from evorl.runs.directory import RESUMES as RESUMES_FILE
from evorl.runs.directory import SUMMARY as SUMMARY_FILE
from evorl.runs.json_lines import JsonLines, Row
from evorl.runs.table import Table, as_table
from evorl.system.files import read_json, reason
from evorl.types import Measured, Number, UserError, Words


class SummaryFile(TypedDict, total=False):
    """The keys of `summary.json` that commands use, with their types."""

    solved: bool | None
    best_fitness: Measured | None
    best_fitness_std: Measured | None
    best_fitness_episodes: Number
    agent_steps: Number
    wall_clock_seconds: Annotated[Measured, Field(ge=0)]
    ended: Words


class AgentFile(TypedDict, total=False):
    """The key of `elite/agent.json` used to find the elite's ancestors."""

    id: Number


class ResumesFile(TypedDict, total=False):
    """The content of `resumes.json`: the generations after which a run was resumed, oldest first."""

    generations: Annotated[list[Number], Field(max_length=MOST_RESUMES)]


SUMMARY, AGENT, RESUMES = TypeAdapter(SummaryFile), TypeAdapter(AgentFile), TypeAdapter(ResumesFile)


@dataclass(frozen=True)
class RunOverview:
    """The outcome of a run, read without its long files.

    `last` is the newest line of `metrics.jsonl`, empty before there is one; `elite` describes the best agent so far.
    `summary` says how the run ended; it is empty while the run trains, and after a kill. `resumes` are the generations
    after which the run was resumed.
    """

    path: Path
    config: Row
    last: Row
    elite: Row
    summary: Row
    resumes: Sequence[int] = ()


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's directory. Its tables are sequences of rows, which `columns` converts to arrays.

    `metrics` has one row per generation, `lineage` one per agent and generation, in file order. Both are stored by
    column, with 9 bytes for each number that is not the same in all rows: a sixth of the files' size. `config` is the
    configuration as written, `elite` describes the best agent so far. `summary` says how the run ended; it is empty
    while the run trains, and after a kill.
    """

    path: Path
    config: Row
    metrics: Sequence[Row]
    lineage: Sequence[Row]
    elite: Row
    summary: Row

    def __repr__(self) -> str:
        ended = self.summary.get("ended", "not ended")
        tables = f"{len(self.metrics)} generations, {len(self.lineage)} rows of lineage"
        return f"<RunRecord {from_here(self.path)}: {tables}, {ended}>"

    def metric(self, name: str) -> NDArray[np.float64]:
        """A scalar metric [G], such as `best_fitness`; NaN for generations without it."""
        return as_table(self.metrics).numbers(name)


def read_overview(path: Path) -> RunOverview:
    """Read the outcome of the run in a directory. Raises UserError like `read_run`."""
    config = saved_settings(path)
    try:
        last = JsonLines(path / METRICS).last() or {}
        elite = _object(path / ELITE_FACTS, AGENT)
        summary = _object(path / SUMMARY_FILE, SUMMARY)
        resumes = _object(path / RESUMES_FILE, RESUMES).get("generations", [])
    except OSError as error:
        raise UserError(reason(error, path)) from error
    return RunOverview(path, config, last, elite, summary, resumes)


def read_run(path: str | Path) -> RunRecord:
    """Read a run's directory, skipping damaged and incomplete lines.

    Raises UserError if there is no run, or one of its files cannot be read.
    """
    run = Path(path)
    config = saved_settings(run)
    try:
        metrics, lineage = (Table(JsonLines(run / file).rows()) for file in (METRICS, LINEAGE))
        elite = _object(run / ELITE_FACTS, AGENT)
        summary = _object(run / SUMMARY_FILE, SUMMARY)
    except OSError as error:
        raise UserError(reason(error, run)) from error
    return RunRecord(run, config, metrics, lineage, elite, summary)


def _object(path: Path, schema: TypeAdapter[Any]) -> Row:
    """Read the object in a JSON file; empty if the file is missing, incomplete or not an object.

    Raises UserError if a value does not have the type that `schema` gives for its key.
    """
    with contextlib.suppress(ValueError, FileNotFoundError):
        value = read_json(path)
        if not isinstance(value, dict):
            return {}
        try:
            schema.validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"{path}: {place}: {shown(first['input'])} does not fit: {first['msg']}") from error
        return value
    return {}
