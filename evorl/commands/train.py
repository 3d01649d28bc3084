"""`evorl train` and `resume`: start a training program on one process or several.

What imports torch is imported where it is needed: a mistyped key needs none.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.commands.command import file_and_assignments
from evorl.config import AnyConfig, read_yaml, validate
from evorl.config.fields import leaves
from evorl.config.yaml import ACCELERATE, PACKAGE, assignment, override
from evorl.runs.configuration import ASYNCHRONOUS, ONLINE, program_for, read_config
from evorl.runs.storage.checkpoint_files import INTERIM, STATE, Checkpoints
from evorl.runs.storage.directory import (
    CONFIG,
    check_run,
    check_same_run,
)
from evorl.runs.storage.trust import refuse_code
from evorl.system.console import say
from evorl.system.files import CHECKPOINTS, LOCK, read_object
from evorl.system.plugins import site_packages
from evorl.system.processes import usable_cores
from evorl.types.outcomes import EvorlWarning, UserError

LOCAL_LAUNCHER = PACKAGE / "distributed" / "local_launch.py"


def train(parsed: argparse.Namespace) -> None:
    """`evorl train`: a new run."""
    _refuse_settings_given_twice(parsed)
    if parsed.no_track:
        parsed.words = [*parsed.words, "tracking.backends=[]"]
    arguments = program_arguments(parsed.words, parsed.seed, parsed.name)
    config = read_config(Path(arguments[1]), arguments[2:])
    if parsed.processes > 1:
        check_launch(config, parsed.processes)
    start(program_for(config), arguments, parsed.processes)


def check_launch(config: AnyConfig, processes: int) -> None:
    """Raise UserError if the processes would, for each of which the launcher would add a traceback.

    What they also warn of is not told here.
    """
    from evorl.runs.launch import check

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvorlWarning)
        check(config, ranks=processes)


def start(program: Path, arguments: Sequence[str], processes: int) -> None:
    """Train in this process, or replace it by Accelerate's launcher or by a program of the user's own."""
    if processes == 1 and program in (ONLINE, ASYNCHRONOUS):
        from evorl.runs.train import main_of

        main_of(program)(arguments, ())
        return
    if processes > (cores := usable_cores()):
        say(f"warning: --processes: {processes} processes share {cores} cores and wait for each other")
    command = launch_command(program, arguments, processes)
    # Signals and the exit code are then the command's.
    os.execve(command[0], command, with_this_package())


def _refuse_settings_given_twice(parsed: argparse.Namespace) -> None:
    """Raise UserError if an option is given together with the setting that it stands for."""
    overridden = leaves(override({}, file_and_assignments(parsed.words)[1]))
    for option, key, value in (
        ("--seed", "seed", parsed.seed),
        ("--name", "run.name", parsed.name),
        ("--no-track", "tracking.backends", parsed.no_track or None),
    ):
        if value is not None and key in overridden:
            raise UserError(f"{key}: {option} sets it; leave one of them out")


def program_arguments(words: Sequence[str], seed: int | None, name: str | None) -> list[str]:
    """Convert the command line to the arguments of the training program. Raises UserError."""
    file, assignments = file_and_assignments(words)
    assignments += [] if seed is None else [f"seed={seed}"]
    assignments += [] if name is None else [assignment("run.name", name)]
    return ["--config", str(file), *assignments]


def resume(parsed: argparse.Namespace) -> None:
    """`evorl resume`: trains the run further."""
    start(*resumption(parsed.run, parsed.overrides, parsed.program, parsed.processes, parsed.allow_code))


def resumption(
    run: Path, overrides: Sequence[str], program: Path | None, processes: int | None, allow_code: bool = False
) -> tuple[Path, list[str], int]:
    """The program that resumes a run, its arguments, and the number of processes, by default that of the run.

    Raises UserError if the overrides change a setting that a resumed run may not change.
    """
    check_run(run)
    overridden = leaves(override({}, overrides))
    for key in ("run", "run.name", "run.directory", "run.resume"):
        if key in overridden:
            raise UserError(
                f"{key}: a resumed run stays in its directory, {run}; leave it out, or begin a new run from its agents "
                f"with population.from={run}"
            )
    where = run.resolve()
    location = [assignment("run.directory", str(where.parent)), assignment("run.name", where.name), "run.resume=auto"]
    assignments = [*overrides, *location]
    config = read_config(run / CONFIG, assignments)
    refuse_code(validate(read_yaml(run / CONFIG)), allow_code)
    ranks = processes_for(ranks_of(run), processes)
    check_same_run(run, config)
    if ranks > 1:
        check_launch(config, ranks)
    return program_of(config, program), ["--config", str(run / CONFIG), *assignments], ranks


def program_of(config: AnyConfig, program: Path | None) -> Path:
    """Return the program of one's own, or else the one that trains this configuration. Raises UserError."""
    program = program or program_for(config)
    if not program.is_file():
        raise UserError(f"--program: there is no file {program}; name the program that trained the run")
    return program


def launch_command(program: Path, arguments: Sequence[str], processes: int) -> list[str]:
    """The command that starts a program on a number of processes."""
    if processes == 1:
        return [sys.executable, str(program), *arguments]
    # Without -P, a `yaml.py` in the working directory, which may be an untrusted run, would be imported as yaml.
    launcher = [sys.executable, "-P", str(LOCAL_LAUNCHER), "--config_file", str(ACCELERATE)]
    return [*launcher, "--num_processes", str(processes), str(program), *arguments]


def processes_for(had: int, asked: int | None) -> int:
    """Return the number `asked` for, else the number that a run `had`. Raises UserError if that exceeds the cores."""
    ranks, cores = asked or had, usable_cores()
    if ranks > cores and asked is None:
        raise UserError(
            f"--processes: the run had {ranks}, but only {cores} core{'s are' if cores > 1 else ' is'} available; "
            "say how many to start"
        )
    return ranks


def ranks_of(run: Path) -> int:
    """Return the number of ranks that saved a run's newest checkpoint, else that of its lock's last owner, or 1.

    The lock also has the number of a start that failed, with which a resumed run would lose its replay.
    """
    states = [read_object(run / LOCK)]
    for stem in ("generation", INTERIM):
        checkpoints = Checkpoints(run / CHECKPOINTS, stem=stem)
        states += [read_object(checkpoints.path(number) / STATE) for number in checkpoints.generations()[-1:]]
    # Of the same generation, a checkpoint within the next one is the newer.
    return max(1, _number(max(reversed(states), key=lambda state: _number(state, "generation")), "ranks"))


def _number(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    return value if isinstance(value, int) else -1


def with_this_package() -> dict[str, str]:
    """The environment variables for a process that imports this `evorl`, and no other one that is installed."""
    above = str(PACKAGE.parent)
    if above in site_packages():  # Where the process finds it anyway, after what the user has put first.
        return {**os.environ}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))}
