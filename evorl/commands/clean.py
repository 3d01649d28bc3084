"""`evorl clean`: remove what only a resumed run would need."""

from __future__ import annotations

import argparse
from pathlib import Path

from evorl.commands.command import Command
from evorl.system.files import is_locked, refuse_links, remove, size_of
from evorl.types import UserError


def clean(run: Path, remove_them: bool) -> str:
    """Say how much room a run's checkpoints take; with `remove_them` they are gone then. Raises UserError."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: there is no run here (no config.yaml)")
    if is_locked(run):
        raise UserError(f"{run}: is still training")
    checkpoints = run / "checkpoints"
    refuse_links(checkpoints)
    size = size_of(checkpoints)
    if remove_them:
        remove(checkpoints)
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
