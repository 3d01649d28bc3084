"""Reading a run's files, including those of a run still in training. Axes: G generations, N rows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from evorl.config.errors import shown
from evorl.runs.config_file import read_config
from evorl.runs.elite import Measured, Number
from evorl.runs.history import JsonLines, Row
from evorl.runs.table import Table
from evorl.system.files import read_bounded, reason
from evorl.system.formats import parse_json
from evorl.types import UserError, Words

MAX_COLUMNS = 10_000
"""The maximum number of columns of a table; a manipulated file could name almost one per byte."""


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


SUMMARY, AGENT = TypeAdapter(SummaryFile), TypeAdapter(AgentFile)


@dataclass(frozen=True)
class RunOverview:
    """The outcome of a run, read without its long files.

    `last` is the newest line of `metrics.jsonl`, empty before there is one; `elite` describes the best agent so far.
    `summary` says how the run ended; it is empty while the run trains, and after a kill.
    """

    path: Path
    config: Row
    last: Row
    elite: Row
    summary: Row


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

    def metric(self, name: str) -> NDArray[np.float64]:
        """Return a scalar metric [G], such as `best_fitness`; NaN for generations without it."""
        return _table(self.metrics).numbers(name)


def read_overview(path: Path) -> RunOverview:
    """Read the outcome of the run in a directory. Raises UserError like `read_run`."""
    config = read_config(path)
    try:
        last = JsonLines(path / "metrics.jsonl").last() or {}
        elite = _object(path / "elite" / "agent.json", AGENT)
        summary = _object(path / "summary.json", SUMMARY)
    except OSError as error:
        raise UserError(reason(error, path)) from error
    return RunOverview(path, config, last, elite, summary)


def read_run(path: str | Path) -> RunRecord:
    """Read a run's directory, skipping damaged and incomplete lines.

    Raises UserError if there is no run, or one of its files cannot be read.
    """
    run = Path(path)
    config = read_config(run)
    try:
        metrics, lineage = (Table(JsonLines(run / f"{name}.jsonl").rows()) for name in ("metrics", "lineage"))
        elite = _object(run / "elite" / "agent.json", AGENT)
        summary = _object(run / "summary.json", SUMMARY)
    except OSError as error:
        raise UserError(reason(error, run)) from error
    return RunRecord(run, config, metrics, lineage, elite, summary)


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Convert a table to columns [N] by name, with nested keys dotted as in `hyperparameters.gamma`.

    Numeric columns are float64, with NaN for missing values; all others have dtype object. Raises UserError if there
    are more than 10,000 columns, which no run writes.
    """
    table = _table(rows)
    found = table.columns()
    if len(found) > MAX_COLUMNS:
        raise UserError(f"a table of {len(found):,} columns; a run writes less than {MAX_COLUMNS:,}")
    return {name: column.array(len(table)) for name, column in found.items()}


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return rows if isinstance(rows, Table) else Table(rows)


def _object(path: Path, schema: TypeAdapter[Any]) -> Row:
    """Read the object in a JSON file; empty if the file is missing, incomplete or not an object.

    Raises UserError if a value does not have the type that `schema` gives for its key.
    """
    with contextlib.suppress(ValueError, FileNotFoundError):
        value = parse_json(read_bounded(path))
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
