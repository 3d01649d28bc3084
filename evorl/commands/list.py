"""`evorl list`: the runs of a directory."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path
from typing import Any

from evorl.commands.command import Command
from evorl.config.errors import on_one_line
from evorl.runs.read import RunOverview, read_overview
from evorl.system.console import aligned, digits
from evorl.system.files import is_locked, size_of
from evorl.types import UserError

WIDEST = 80
"""The maximum number of characters in a cell, except the run's name."""
HEADINGS = ("run", "environment", "algorithm", "seed", "best", "steps", "state", "size")


def rows_of(directory: Path) -> list[tuple[str, ...]]:
    """Return one table row per run in a directory, oldest first. Raises OSError."""
    began = {path: _began(path) for path in directory.iterdir() if not path.is_symlink()}
    known = sorted((time, path) for path, time in began.items() if time is not None)
    # One very long value would push the columns of all other runs off the screen.
    return [(path.name, *(on_one_line(cell, WIDEST) for cell in _row(path)[1:])) for _, path in known]


def _began(path: Path) -> float | None:
    """Return the modification time of a run's configuration, 0 if it is not accessible, None if there is no run."""
    try:
        status = (path / "config.yaml").stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0.0
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None


def _row(path: Path) -> tuple[str, ...]:
    try:
        run = read_overview(path)
    except (UserError, OSError):
        return (path.name, "?", "?", "?", "-", "-", "cannot be read", _megabytes(path))
    best, steps = run.last.get("elite_fitness"), run.last.get("agent_steps")
    return (
        path.name,
        _setting(run, "environment", "id"),
        _setting(run, "algorithm", "name"),
        str(run.config.get("seed", "?")),
        digits(best) if isinstance(best, int | float) else "-",
        f"{steps:,}" if isinstance(steps, int) else "-",
        state_of(run),
        _megabytes(path),
    )


def state_of(run: RunOverview) -> str:
    """Return a run's state: `training`, `begun`, `killed`, `solved`, or how its summary says it ended."""
    if is_locked(run.path):
        return "training"
    if not run.summary:
        return "killed" if run.last else "begun"
    ended = "solved" if run.summary.get("solved") is True else run.summary.get("ended")
    return str(ended)


def _setting(run: RunOverview, section: str, key: str) -> str:
    values: Any = run.config.get(section)
    return str(values.get(key, "?")) if isinstance(values, dict) else "?"


def _megabytes(path: Path) -> str:
    return f"{size_of(path) / 1e6:,.1f} MB"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")


def _run(parsed: argparse.Namespace) -> None:
    rows = rows_of(parsed.run)
    if not rows:
        print(f"there is no run in {parsed.run}")
        return
    print("\n".join(map(on_one_line, aligned([HEADINGS, *rows]))))


COMMAND = Command(run=_run, arguments=_arguments, examples=("evorl list", "evorl list results/ppo"))
