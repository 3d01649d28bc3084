"""`evorl clean`: remove a run's checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from evorl.commands.command import Command
from evorl.runs.config_file import check_run
from evorl.system.files import Lock, is_locked, remove, size_of
from evorl.types import UserError


def clean(run: Path, remove_them: bool) -> str:
    """Describe the size of a run's checkpoints, in MB, and remove them if `remove_them`. Raises UserError."""
    check_run(run)
    if is_locked(run):
        raise UserError(f"{run}: is still training")
    checkpoints = run / "checkpoints"
    size = size_of(checkpoints)
    if remove_them:
        # Hold the lock, so that no process starts to resume from checkpoints that are being removed.
        lock = Lock(run, wait=0.0)
        try:
            remove(checkpoints)
        finally:
            lock.release()
        return f"{run}: {size / 1e6:,.1f} MB of checkpoints removed; what is left can be evaluated, and not resumed"
    return f"{run}: {size / 1e6:,.1f} MB of checkpoints, which --yes removes"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the runs' directories")
    parser.add_argument("--yes", action="store_true", help="remove the checkpoints, and do not only say their size")


def _run(parsed: argparse.Namespace) -> None:
    for run in parsed.runs:
        print(clean(run, parsed.yes))


COMMAND = Command(
    run=_run, arguments=_arguments, examples=("evorl clean runs/my-run", "evorl clean runs/first runs/second --yes")
)
