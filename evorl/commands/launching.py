"""Command lines that start a training program on one process or, with Accelerate's launcher, on several."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from evorl.commands.command import add_overrides, add_run, count
from evorl.config import AnyConfig
from evorl.config.shipped import ACCELERATE, PACKAGE
from evorl.runs.checkpoint import Checkpoints
from evorl.runs.programs import ASYNCHRONOUS, ONLINE
from evorl.runs.progress import progress_of
from evorl.system.processes import usable_cores
from evorl.types import UserError

LOCAL_LAUNCHER = PACKAGE / "distributed" / "local_launch.py"


def launch_command(arguments: Sequence[str], processes: int) -> list[str]:
    """Return the command that starts the program `arguments[0]` on a number of processes."""
    if processes == 1:
        return [sys.executable, *arguments]
    # Without -P, a `yaml.py` in the working directory, which may be an untrusted run, would be imported as yaml.
    launcher = [sys.executable, "-P", str(LOCAL_LAUNCHER), "--config_file", str(ACCELERATE)]
    return [*launcher, "--num_processes", str(processes), *arguments]


def program_for(named: Path, config: AnyConfig) -> Path:
    """Return the program `named`, or by default the algorithm's demo. Raises UserError if the file does not exist."""
    program = ASYNCHRONOUS if named == ONLINE and config.actors is not None else named
    if not program.is_file():
        raise UserError(f"--program: there is no file {program}; name the program that trained the run")
    return program


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the run's directory, `key.path=value` overrides, `--processes` and `--program`."""
    add_run(parser)
    add_overrides(parser)
    parser.add_argument("--processes", type=count, help="default: as many as before")
    parser.add_argument("--program", type=Path, default=ONLINE, help="what trained it (default: its demo)")


def processes_for(run: Path, asked: int | None) -> int:
    """Return the number `asked` for, else the run's. Raises UserError if the run's number exceeds the usable cores."""
    ranks, cores = asked or _ranks_of(run), usable_cores()
    if ranks > cores and asked is None:
        raise UserError(
            f"--processes: the run had {ranks}, and here {cores} core{'s' if cores > 1 else ''} may be used; "
            "say how many to start"
        )
    return ranks


def _ranks_of(run: Path) -> int:
    """Return the number of ranks of the newest readable checkpoint, which is fully verified only on resume."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    for generation in reversed(checkpoints.generations()):
        with contextlib.suppress(UserError):
            return progress_of(checkpoints.read(generation, "state.json"), str(checkpoints.path(generation))).ranks
    return 1
