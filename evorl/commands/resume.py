"""`evorl resume`: resume a run from its newest checkpoint."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from evorl.commands.command import Command
from evorl.commands.launching import add_launch, launch_command, processes_for, program_for
from evorl.runs.config_file import check_run
from evorl.runs.directory import check_same_run
from evorl.runs.launch import check, read_config
from evorl.runs.trust import refuse_code


def resume_command(
    run: Path, overrides: Sequence[str], program: Path, processes: int | None, allow_code: bool = False
) -> list[str]:
    """Return the command that resumes a run, by default on as many processes as it had.

    Raises UserError if the overrides change a setting that a resumed run may not change.
    """
    check_run(run)
    directory, name = (json.dumps(str(part), ensure_ascii=False) for part in (run.resolve().parent, run.resolve().name))
    place = [f"run.directory={directory}", f"run.name={name}", "run.resume=auto"]
    given = [*overrides, *place]
    config = read_config(run / "config.yaml", given)
    refuse_code(config, allow_code)
    check_same_run(run, check(config))
    program = program_for(program, config)
    return launch_command([str(program), "--config", str(run / "config.yaml"), *given], processes_for(run, processes))


def _run(parsed: argparse.Namespace) -> None:
    command = resume_command(parsed.run, parsed.overrides, parsed.program, parsed.processes, parsed.allow_code)
    os.execv(command[0], command)


COMMAND = Command(
    run=_run,
    arguments=add_launch,
    examples=("evorl resume runs/my-run", "evorl resume runs/my-run training.max_steps=2000000 --processes 4"),
)
