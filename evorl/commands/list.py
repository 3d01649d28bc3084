"""`evorl list`: the runs of a directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from evorl.commands.command import Command
from evorl.config.errors import on_one_line
from evorl.runs.read import RunOverview, read_overview
from evorl.system.console import aligned, digits
from evorl.system.files import is_locked, size_of
from evorl.types import UserError

HEADINGS = ("run", "environment", "algorithm", "seed", "best", "steps", "state", "size")


def rows_of(directory: Path) -> list[tuple[str, ...]]:
    """Return what is listed of each run in a directory, oldest first. Raises OSError."""
    paths = [path for path in directory.iterdir() if (path / "config.yaml").is_file() and not path.is_symlink()]
    return [_row(path) for path in sorted(paths, key=lambda path: (path / "config.yaml").stat().st_mtime)]


def _row(path: Path) -> tuple[str, ...]:
    try:
        run = read_overview(path)
    except UserError:
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
    """Return in words what has become of a run."""
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
