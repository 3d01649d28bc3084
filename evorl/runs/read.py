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
from evorl.runs.history import JsonLines
from evorl.system.files import read_bounded, reason, refuse_links
from evorl.types import UserError

Row = dict[str, Any]
MAX_COLUMNS = 10_000
"""Columns of a table; a file that others have changed could name one for each of its bytes."""


@dataclass(frozen=True)
class RunRecord:
    """Hold what a run's directory tells: tables as lists of rows, which `columns` turns into arrays.

    `metrics` has a row for each generation, `lineage` one for each agent and generation, in the order of the files.
    `config` is the configuration as it was written, `elite` describes the best agent so far. `summary` says how the run
    ended; it is empty while the run trains, and where it was killed.
    """

    path: Path
    config: Row
    metrics: list[Row]
    lineage: list[Row]
    elite: Row
    summary: Row

    def metric(self, name: str) -> NDArray[np.float64]:
        """Return a metric [G], such as `best_fitness`; NaN in generations that have no number of this name."""
        return np.array([_number(row.get(name)) for row in self.metrics], dtype=np.float64)


def read_run(path: str | Path) -> RunRecord:
    """Return what stands in the directory of a run; lines that are damaged or not yet whole are left out.

    Raises UserError where there is no run, or a file of it cannot be read.
    """
    run = Path(path)
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: there is no run here (no config.yaml)")
    files = [run / name for name in ("config.yaml", "metrics.jsonl", "lineage.jsonl", "elite", "summary.json")]
    refuse_links(*files, run / "elite" / "agent.json")
    try:
        metrics, lineage = (JsonLines(run / f"{name}.jsonl").read() for name in ("metrics", "lineage"))
        return RunRecord(
            path=run,
            config=read_yaml(run / "config.yaml"),
            metrics=metrics,
            lineage=lineage,
            elite=_object(run / "elite" / "agent.json"),
            summary=_object(run / "summary.json"),
        )
    except OSError as error:
        raise UserError(reason(error, run)) from error


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Return the rows of a table as columns [N] by name, sections as in `hyperparameters.gamma`.

    Columns of numbers are float64, with NaN where a row has none; all others hold objects. Raises UserError where rows
    name more columns than a run has.
    """
    flat = [_flattened(row) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    if len(names) > MAX_COLUMNS:
        raise UserError(f"a table of {len(names):,} columns; a run writes less than {MAX_COLUMNS:,}")
    return {name: _column([row.get(name) for row in flat]) for name in names}


def _flattened(row: Mapping[str, Any], prefix: str = "") -> Row:
    flat: Row = {}
    for key, value in row.items():
        flat |= _flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _column(values: list[Any]) -> NDArray[Any]:
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([_number(value) for value in values], dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _number(value: Any) -> float:
    """Return a JSON value as a number, NaN where it is none."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else np.nan
    return np.nan


def _object(path: Path) -> Row:
    """Return the object in a JSON file; empty where there is none, or no whole one."""
    with contextlib.suppress(ValueError, RecursionError, FileNotFoundError):
        value = json.loads(read_bounded(path))
        return value if isinstance(value, dict) else {}
    return {}
