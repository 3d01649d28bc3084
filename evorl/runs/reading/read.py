"""Reading a run's files, including those of a run still in training. Axes: G generations, N rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from evorl.config.errors import shown
from evorl.runs.storage.directory import ELITE_FACTS, LINEAGE, METRICS, from_here, saved_settings
from evorl.runs.storage.directory import SUMMARY as SUMMARY_FILE
from evorl.runs.storage.json_lines import JsonLines, Row
from evorl.system.files import file_errors, read_json
from evorl.types.agents import Measured, Number, Words
from evorl.types.outcomes import UserError


class PairFile(TypedDict):
    """The means of an island's best agent and of its twin's, in `summary.json`; null without a fitness."""

    evolved: Measured | None
    control: Measured | None


class ComparisonFile(TypedDict):
    """The keys of the comparison of evolution with none by which others follow."""

    pairs: Annotated[list[PairFile], Field(max_length=1_000)]
    episodes: Number


class SummaryFile(TypedDict, total=False):
    """The keys of `summary.json` that commands use, with their types."""

    solved: bool | None
    best_fitness: Measured | None
    best_fitness_std: Measured | None
    best_fitness_episodes: Number
    agent_steps: Number
    wall_clock_seconds: Annotated[Measured, Field(ge=0)]
    comparison: ComparisonFile | None
    ended: Words


class AgentFile(TypedDict, total=False):
    """The key of `elite/agent.json` used to find the elite's ancestors."""

    id: Number


MAX_COLUMNS = 10_000
"""The maximum number of columns of a table; a manipulated file could name almost one per byte."""
DEEP = 50
"""The nesting depth up to which the members of objects get columns of their own."""
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
    """The contents of a run's directory. Its tables are lists of rows, which `columns` converts to arrays.

    `metrics` has one row per generation, `lineage` one per agent and generation, in file order. `config` is the
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
        return np.array([_number(row.get(name)) for row in self.metrics])


def read_overview(path: Path) -> RunOverview:
    """Read the outcome of the run in a directory. Raises UserError like `read_run`."""
    config = saved_settings(path)
    with file_errors(path):
        last = JsonLines(path / METRICS).last() or {}
        elite = _object(path / ELITE_FACTS, AGENT)
        summary = _object(path / SUMMARY_FILE, SUMMARY)
    return RunOverview(path, config, last, elite, summary)


def read_run(path: str | Path) -> RunRecord:
    """Read a run's directory, skipping damaged and incomplete lines.

    Raises UserError if there is no run, or one of its files cannot be read.
    """
    run = read_overview(Path(path))
    with file_errors(run.path):
        metrics, lineage = (list(JsonLines(run.path / file).rows()) for file in (METRICS, LINEAGE))
    return RunRecord(run.path, run.config, metrics, lineage, run.elite, run.summary)


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Convert a table to columns [N] by name, with nested keys dotted as in `hyperparameters.gamma`.

    Numeric columns are float64, with NaN for missing values; all others have dtype object. Raises UserError if there
    are more than 10,000 columns, which no run writes.
    """
    table: dict[str, list[Any]] = {}
    for count, row in enumerate(rows):
        for name, value in _leaves(row):
            column = table.setdefault(name, [])
            column[count:] = [None] * (count - len(column)) + [value]
        if len(table) > MAX_COLUMNS:
            raise UserError(f"a table of more than {MAX_COLUMNS:,} columns, which no run writes")
    return {name: _array(column + [None] * (len(rows) - len(column))) for name, column in table.items()}


def _leaves(row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The values of a row by their dotted names, without objects unless these are too deep."""
    for key, value in row.items():
        if isinstance(value, dict) and depth < DEEP:
            yield from _leaves(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _array(values: Sequence[Any]) -> NDArray[Any]:
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([_number(value) for value in values])
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    return objects


def _number(value: Any) -> float:
    """Convert a JSON value to float; NaN if it is not a number or overflows."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else np.nan
    return np.nan


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
            key = ".".join(map(str, first["loc"]))
            raise UserError(f"{path}: {key}: {shown(first['input'])} does not fit: {first['msg']}") from error
        return value
    return {}
