"""Read what a run has written, also while it still trains. Axes: G generations, N rows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.config import read_yaml
from evorl.runs.history import JsonLines, Row
from evorl.runs.table import Table
from evorl.system.files import read_bounded, reason, refuse_links
from evorl.types import UserError

MAX_COLUMNS = 10_000
"""Columns of a table; a file that others have changed could name one for each of its bytes."""


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
    _check_run(path)
    try:
        last = JsonLines(path / "metrics.jsonl").last() or {}
        elite, summary = _object(path / "elite" / "agent.json"), _object(path / "summary.json")
    except OSError as error:
        raise UserError(reason(error, path)) from error
    return RunOverview(path, read_yaml(path / "config.yaml"), last, elite, summary)


def read_run(path: str | Path) -> RunRecord:
    """Return the contents of a run's directory; lines that are damaged or not yet whole are left out.

    Raises UserError where there is no run, or a file of it cannot be read.
    """
    run = Path(path)
    _check_run(run)
    try:
        metrics, lineage = (Table(JsonLines(run / f"{name}.jsonl").rows()) for name in ("metrics", "lineage"))
        elite, summary = _object(run / "elite" / "agent.json"), _object(run / "summary.json")
    except OSError as error:
        raise UserError(reason(error, run)) from error
    return RunRecord(run, read_yaml(run / "config.yaml"), metrics, lineage, elite, summary)


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


def _check_run(run: Path) -> None:
    """Raise UserError unless a directory holds a run, in files of its own."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: there is no run here (no config.yaml)")
    files = [run / name for name in ("config.yaml", "metrics.jsonl", "lineage.jsonl", "elite", "summary.json")]
    refuse_links(*files, run / "elite" / "agent.json")


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return rows if isinstance(rows, Table) else Table(rows)


def _object(path: Path) -> Row:
    """Return the object in a JSON file; empty where there is none, or no whole one."""
    with contextlib.suppress(ValueError, RecursionError, FileNotFoundError):
        value = json.loads(read_bounded(path))
        return value if isinstance(value, dict) else {}
    return {}
