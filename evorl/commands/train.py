"""`evorl train` and `resume`: start a training program on one process or several."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from evorl.commands.command import file_and_assignments
from evorl.config import read_yaml
from evorl.config.fields import leaves
from evorl.config.yaml import ACCELERATE, PACKAGE, VERBOSE, assignment, override, plain_assignments, read_settings
from evorl.runs.launch import check, read_config
from evorl.runs.reading.read import read_overview
from evorl.runs.reading.trust import refuse_code
from evorl.runs.storage.checkpoint_files import STATE, Checkpoints
from evorl.runs.storage.directory import CONFIG, check_run, check_same_run, saved_config
from evorl.runs.storage.progress import progress_of
from evorl.runs.train import ASYNCHRONOUS, ONLINE, main_of, program_for
from evorl.system.files import CHECKPOINTS
from evorl.system.processes import usable_cores
from evorl.types import UserError

LOCAL_LAUNCHER = PACKAGE / "distributed" / "local_launch.py"


def train(parsed: argparse.Namespace) -> None:
    """`evorl train`: trains in this process or, for several processes, replaces it with Accelerate's launcher."""
    _refuse_settings_given_twice(parsed)
    if parsed.no_track:
        parsed.words = [*parsed.words, "tracking.backends=[]"]
    arguments = program_arguments([*parsed.words, *_verbosity(parsed)], parsed.seed, parsed.name)
    program = program_for(read_settings(Path(arguments[1]), arguments[2:]))
    if parsed.processes == 1:
        main_of(program)(arguments, ())
        return
    # Check first: otherwise every process would find the same error, and the launcher would add a traceback for each.
    check(read_config(Path(arguments[1]), arguments[2:]), ranks=parsed.processes)
    _become(launch_command([str(program), *arguments], parsed.processes))


def _refuse_settings_given_twice(parsed: argparse.Namespace) -> None:
    """Raise UserError if an option is given together with the setting that it stands for."""
    settings = _assigned(parsed.words)
    for option, key, value in (
        ("--seed", "seed", parsed.seed),
        ("--name", "run.name", parsed.name),
        ("--verbose", "run.verbose", parsed.verbose or None),
    ):
        if value is not None and key in settings:
            raise UserError(f"{key}: {option} sets it; leave one of them out")


def _assigned(words: Sequence[str]) -> set[str]:
    """The keys of the assignments on a command line, also of those in a section that is given as a whole."""
    keys = set()
    for word in plain_assignments(words, "seed"):
        if "=" in word:
            # A file name may contain "=" too.
            with contextlib.suppress(UserError):
                keys |= {word.partition("=")[0], *leaves(override({}, [word]))}
    return keys


def _verbosity(parsed: argparse.Namespace) -> list[str]:
    return [VERBOSE] if parsed.verbose else []


def program_arguments(words: Sequence[str], seed: int | None, name: str | None) -> list[str]:
    """Convert the command line to the arguments of the training program. Raises UserError."""
    file, given = file_and_assignments(words)
    given += [] if seed is None else [f"seed={seed}"]
    given += [] if name is None else [assignment("run.name", name)]
    return ["--config", str(file), *given]


def resume(parsed: argparse.Namespace) -> None:
    """`evorl resume`: the training program replaces this process."""
    given = [*parsed.overrides, *_verbosity(parsed)]
    _become(resume_command(parsed.run, given, parsed.program, parsed.processes, parsed.allow_code))


def resume_command(
    run: Path, overrides: Sequence[str], program: Path | None, processes: int | None, allow_code: bool = False
) -> list[str]:
    """Return the command that resumes a run, by default on as many processes as it had.

    Raises UserError if the overrides change a setting that a resumed run may not change.
    """
    check_run(run)
    for key in ("run", "run.name", "run.directory", "run.resume"):
        if key in _assigned(overrides):
            raise UserError(
                f"{key}: a resumed run stays in its directory, {run}; leave it out, or begin a new run from its agents "
                f"with population.from={run}"
            )
    where = run.resolve()
    location = [assignment("run.directory", str(where.parent)), assignment("run.name", where.name), "run.resume=auto"]
    given = [*overrides, *location]
    config = read_config(run / CONFIG, given)
    refuse_code(saved_config(read_yaml(run / CONFIG)), allow_code)
    ranks = processes_for(run, processes)
    check_same_run(run, check(config, ranks=ranks))
    program = program or (ONLINE if config.actors is None else ASYNCHRONOUS)
    if not program.is_file():
        raise UserError(f"--program: there is no file {program}; name the program that trained the run")
    return launch_command([str(program), "--config", str(run / CONFIG), *given], ranks)


def launch_command(arguments: Sequence[str], processes: int) -> list[str]:
    """Return the command that starts the program `arguments[0]` on a number of processes."""
    if processes == 1:
        return [sys.executable, *arguments]
    # Without -P, a `yaml.py` in the working directory, which may be an untrusted run, would be imported as yaml.
    launcher = [sys.executable, "-P", str(LOCAL_LAUNCHER), "--config_file", str(ACCELERATE)]
    return [*launcher, "--num_processes", str(processes), *arguments]


def processes_for(run: Path, asked: int | None) -> int:
    """Return the number `asked` for, else the run's. Raises UserError if the run's number exceeds the usable cores."""
    ranks, cores = asked or _ranks_of(run), usable_cores()
    if ranks > cores and asked is None:
        raise UserError(
            f"--processes: the run had {ranks}, but only {cores} core{'s are' if cores > 1 else ' is'} available; "
            "say how many to start"
        )
    return ranks


def _ranks_of(run: Path) -> int:
    """Return the number of ranks of the newest readable checkpoint, which is fully verified only on resume.

    An interim checkpoint, saved within a generation, is newer than all others. A run without checkpoints has the number
    in its metrics.
    """
    for stem in ("interim", "generation"):
        checkpoints = Checkpoints(run / CHECKPOINTS, keep=1, stem=stem)
        for number in reversed(checkpoints.generations()):
            with contextlib.suppress(UserError):
                return progress_of(checkpoints.read(number, STATE), str(checkpoints.path(number))).ranks
    with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
        return max(1, int(read_overview(run).last["ranks"]))
    return 1


def _become(command: Sequence[str]) -> None:
    """Replace this process by a command, so that signals and the exit code are the command's."""
    os.execv(command[0], list(command))
