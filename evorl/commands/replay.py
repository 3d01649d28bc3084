"""`evorl replay`: train a single agent with the hyperparameter schedule of a run's best agent."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from evorl.algorithms import SETTINGS
from evorl.commands.command import Command
from evorl.commands.launching import add_launch, launch_command, processes_for, program_for
from evorl.config import validate, without_removed
from evorl.runs.ancestry import ancestry, replayed
from evorl.runs.directory import load_elite
from evorl.runs.launch import check, read_config
from evorl.runs.trust import refuse_code
from evorl.system.console import say
from evorl.system.files import write_atomically


def replay_command(
    run: Path, overrides: Sequence[str], program: Path, processes: int | None, constant: bool, allow_code: bool = False
) -> list[str]:
    """Return the command that trains one agent with the schedule of a run's best agent.

    If `constant`, the agent uses the best agent's last settings throughout. Writes the configuration into the run's
    directory, and prints how training differs from the original. Raises UserError if there is no such schedule.
    """
    data, _ = load_elite(run)
    config = validate(without_removed(data), SETTINGS)
    refuse_code(config, allow_code)
    path = run / ("replay-constant.yaml" if constant else "replay.yaml")
    write_atomically(path, replayed(config, run, ancestry(run), constant).to_yaml().encode())
    refuse_code(check(read_config(path, overrides)), allow_code)
    if config.algorithm.replayed and config.replay.shared and config.population.size > 1:
        others = config.population.size - 1
        say(f"the winner learned from steps of {others} other agents too (replay.shared); this one has its own only")
    program = program_for(program, config)
    return launch_command([str(program), "--config", str(path.absolute()), *overrides], processes_for(run, processes))


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_launch(parser)
    parser.add_argument("--constant", action="store_true", help="with the best agent's last settings from the start")


def _run(parsed: argparse.Namespace) -> None:
    given = parsed.overrides, parsed.program, parsed.processes, parsed.constant, parsed.allow_code
    command = replay_command(parsed.run, *given)
    os.execv(command[0], command)


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=("evorl replay runs/my-run seed=7", "evorl replay runs/my-run --constant seed=7"),
)
