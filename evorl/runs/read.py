"""Read what a run has written, also while it still trains. Axes: G generations, N rows."""

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
from evorl.records import Words
from evorl.runs.config_file import read_config
from evorl.runs.elite import Measured, Number
from evorl.runs.history import JsonLines, Row
from evorl.runs.table import Table
from evorl.system.files import read_bounded, reason
from evorl.system.json_text import parse_json
from evorl.types import UserError

MAX_COLUMNS = 10_000
"""Columns of a table; a file that others have changed could name one for each of its bytes."""


class SummaryFile(TypedDict, total=False):
    """The part of `summary.json` that commands compute with or print."""

    solved: bool | None
    best_fitness: Measured | None
    best_fitness_std: Measured | None
    best_fitness_episodes: Number
    agent_steps: Number
    wall_clock_seconds: Annotated[Measured, Field(ge=0)]
    ended: Words


class AgentFile(TypedDict, total=False):
    """The part of `elite/agent.json` by which its ancestors are found."""

    id: Number


SUMMARY, AGENT = TypeAdapter(SummaryFile), TypeAdapter(AgentFile)


@dataclass(frozen=True)
class RunOverview:
    """The outcome of a run, for which its long files need not be read.

    `last` is the newest line of `metrics.jsonl`, empty before there is one, `elite` describes the best agent so far.
    `summary` says how the run ended; it is empty while the run trains, and where it was killed.
    """

    path: Path
    config: Row
    last: Row
    elite: Row
    summary: Row


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's directory: its tables are sequences of rows, which `columns` turns into arrays.

    `metrics` has a row for each generation, `lineage` one for each agent and generation, in the order of the files.
    They are kept by columns, 9 bytes for each number that is not the same in all rows: a sixth of the files' size.
    `config` is the configuration as it was written, `elite` describes the best agent so far. `summary` says how the run
    ended; it is empty while the run trains, and where it was killed.
    """

    path: Path
    config: Row
    metrics: Sequence[Row]
    lineage: Sequence[Row]
    elite: Row
    summary: Row

    def metric(self, name: str) -> NDArray[np.float64]:
        """Return a metric [G], such as `best_fitness`; NaN in generations that have no number of this name."""
        return _table(self.metrics).numbers(name)


def read_overview(path: Path) -> RunOverview:
    """Return the outcome of the run in a directory. Raises UserError as `read_run` does."""
    config = read_config(path)
    try:
        last = JsonLines(path / "metrics.jsonl").last() or {}
        elite = _object(path / "elite" / "agent.json", AGENT)
        summary = _object(path / "summary.json", SUMMARY)
    except OSError as error:
        raise UserError(reason(error, path)) from error
    return RunOverview(path, config, last, elite, summary)


def read_run(path: str | Path) -> RunRecord:
    """Return the contents of a run's directory; lines that are damaged or not yet whole are left out.

    Raises UserError where there is no run, or a file of it cannot be read.
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
    """Return the rows of a table as columns [N] by name, sections as in `hyperparameters.gamma`.

    Columns of numbers are float64, with NaN where a row has none; all others hold objects. Raises UserError where rows
    name more columns than a run has.
    """
    table = _table(rows)
    found = table.columns()
    if len(found) > MAX_COLUMNS:
        raise UserError(f"a table of {len(found):,} columns; a run writes less than {MAX_COLUMNS:,}")
    return {name: column.array(len(table)) for name, column in found.items()}


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return rows if isinstance(rows, Table) else Table(rows)


def _object(path: Path, schema: TypeAdapter[Any]) -> Row:
    """Return the object in a JSON file; empty where there is none, or no whole one.

    Raises UserError where a value is not of the type that the `schema` gives its key.
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
