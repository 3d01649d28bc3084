"""Reading a run's files, including those of a run still in training. Axes: G generations, N rows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.config.fields import leaves
from evorl.runs.storage.directory import ELITE_FACTS, LINEAGE, METRICS, SUMMARY, from_here, saved_settings
from evorl.runs.storage.json_lines import JsonLines, Row
from evorl.system.files import file_errors, read_object
from evorl.types.messages import nearest
from evorl.types.outcomes import UserError


@dataclass(frozen=True)
class RunOverview:
    """The outcome of a run, without its tables.

    `last` is the newest line of `metrics.jsonl`, empty before there is one; `elite` describes the best agent so far.
    `summary` says how the run ended; it is empty while the run trains, and after a kill.
    """

    path: Path
    config: Row
    last: Row
    elite: Row
    summary: Row


@dataclass(frozen=True)
class RunRecord(RunOverview):
    """The contents of a run's directory. Its tables are lists of rows, which `columns` converts to arrays.

    `metrics` has one row per generation, `lineage` one per agent and generation, in file order. `config` is the
    configuration as written; the rest is as in `RunOverview`.
    """

    metrics: Sequence[Row]
    lineage: Sequence[Row]

    def __repr__(self) -> str:
        ended = self.summary.get("ended", "not ended")
        tables = f"{len(self.metrics)} generations, {len(self.lineage)} rows of lineage"
        return f"<RunRecord {from_here(self.path)}: {tables}, {ended}>"

    def metric(self, name: str) -> NDArray[np.float64]:
        """A scalar metric [G], such as `best_fitness`; NaN for generations without it.

        Raises UserError if all are without it.
        """
        scalars = {key for row in self.metrics for key, value in row.items() if not isinstance(value, list | dict)}
        if self.metrics and name not in scalars:
            what = f"{from_here(self.path)}: no generation has the number {name!r}"
            raise UserError(what + nearest(name, sorted(scalars)))
        return np.array([_number(row.get(name)) for row in self.metrics])


def read_overview(path: Path) -> RunOverview:
    """Read the outcome of the run in a directory. Raises UserError like `read_run`."""
    config = saved_settings(path)
    with file_errors(path):
        last = JsonLines(path / METRICS).last() or {}
        return RunOverview(path, config, last, read_object(path / ELITE_FACTS), read_object(path / SUMMARY))


def read_run(path: str | Path) -> RunRecord:
    """Read a run's directory, skipping damaged and incomplete lines.

    Raises UserError if there is no run, or one of its files cannot be read.
    """
    run = read_overview(Path(path))
    with file_errors(run.path):
        metrics, lineage = (list(JsonLines(run.path / file).rows()) for file in (METRICS, LINEAGE))
    return RunRecord(**vars(run), metrics=metrics, lineage=lineage)


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Convert a table to columns [N] by name, with nested keys dotted as in `hyperparameters.gamma`.

    Numeric columns are float64, with NaN for missing values; all others have dtype object.
    """
    table: dict[str, list[Any]] = {}
    for count, row in enumerate(rows):
        for name, value in leaves(row).items():
            if value == {}:
                continue
            column = table.setdefault(name, [])
            column[count:] = [None] * (count - len(column)) + [value]
    return {name: _array(column + [None] * (len(rows) - len(column))) for name, column in table.items()}


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
