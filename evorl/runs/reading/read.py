"""Reading a run's files, including those of a run still in training. Axes: G generations, N rows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
class RunRecord:
    """The contents of a run's directory. Its tables are lists of rows, which `columns` converts to arrays.

    `config` is the configuration as written. `last` is the newest line of `metrics.jsonl`, empty before there is one;
    `elite` describes the best agent so far. `summary` says how the run ended; it is empty while the run trains, and
    after a kill.
    """

    path: Path
    config: Row
    last: Row
    elite: Row
    summary: Row

    @cached_property
    def metrics(self) -> list[Row]:
        """One row per generation, in file order, read at the first access. Raises UserError."""
        return self._rows(METRICS)

    @cached_property
    def lineage(self) -> list[Row]:
        """One row per agent and generation, in file order, read at the first access. Raises UserError."""
        return self._rows(LINEAGE)

    def _rows(self, file: str) -> list[Row]:
        """The rows of a file, without damaged and incomplete lines."""
        with file_errors(self.path):
            return list(JsonLines(self.path / file).rows())

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


def read_run(path: str | Path) -> RunRecord:
    """Read a run's directory; its tables are read when they are used.

    Raises UserError if there is no run, or one of its files cannot be read.
    """
    run = Path(path)
    config = saved_settings(run)
    with file_errors(run):
        last = JsonLines(run / METRICS).last() or {}
        # The tables are also found after a change of the working directory.
        return RunRecord(run.absolute(), config, last, read_object(run / ELITE_FACTS), read_object(run / SUMMARY))


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
