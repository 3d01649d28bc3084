"""`evorl train` and `resume`: start a training program on one process or several, or on several seeds.

What imports torch is imported where it is needed: a mistyped key needs none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.commands.command import file_and_assignments
from evorl.commands.inspect import state_of
from evorl.config import AnyConfig, read_yaml, validate
from evorl.config.fields import leaves
from evorl.config.yaml import ACCELERATE, PACKAGE, assignment, override
from evorl.runs.configuration import ASYNCHRONOUS, ONLINE, program_for, read_config
from evorl.runs.reading.read import read_overview
from evorl.runs.storage.checkpoint_files import INTERIM, STATE, Checkpoints
from evorl.runs.storage.directory import (
    CONFIG,
    check_run,
    check_same_run,
    plain_name,
)
from evorl.runs.storage.trust import refuse_code
from evorl.system.console import aligned, digits, say
from evorl.system.files import CHECKPOINTS, LOCK, read_object
from evorl.system.plugins import site_packages
from evorl.system.processes import usable_cores
from evorl.types.messages import on_one_line
from evorl.types.outcomes import EvorlWarning, RunFailed, UserError

LOCAL_LAUNCHER = PACKAGE / "distributed" / "local_launch.py"


def train(parsed: argparse.Namespace) -> None:
    """`evorl train`: a run, or one for each seed."""
    _refuse_settings_given_twice(parsed)
    if parsed.no_track:
        parsed.words = [*parsed.words, "tracking.backends=[]"]
    if parsed.seeds is not None:
        train_seeds(parsed)
        return
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
    words = [*parsed.words, *(each for each in parsed.seeds or () if isinstance(each, str))]
    overridden = leaves(override({}, file_and_assignments(words)[1]))
    for option, key, value in (
        ("--seed", "seed", parsed.seed),
        ("--seeds", "seed", parsed.seeds),
        ("--seeds", "run.resume", parsed.seeds),
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


HEADINGS = ("seed", "run", "best", "episodes", "steps", "seconds", "state")


def train_seeds(parsed: argparse.Namespace) -> None:
    """Train each seed with a command of its own, then print a table. Raises UserError, and RunFailed if any failed."""
    seeds = [each for each in parsed.seeds if isinstance(each, int)]
    if not seeds:
        raise UserError("--seeds: give at least one seed, such as --seeds 1 2 3")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds: each seed may be given once, not {' '.join(map(str, seeds))}")
    if len(seeds) > 1 and os.environ.get("WANDB_SWEEP_ID") and not parsed.no_track:
        raise UserError("--seeds: a run of a W&B sweep is one training run; make `seed` a parameter of the sweep")
    file, assignments = file_and_assignments([*parsed.words, *(each for each in parsed.seeds if isinstance(each, str))])
    config = read_config(file, assignments)
    from evorl.runs.launch import launched

    check_launch(config, parsed.processes)
    name = parsed.name or config.run.name or plain_name(config)
    names = [(number, f"{name}-seed-{number}") for number in seeds]
    runs = [(number, config.run.directory / each) for number, each in names]
    for number, path in runs:
        if (path / CONFIG).is_file():
            requested = launched(read_config(file, [*assignments, f"seed={number}"]))
            check_launch(requested, parsed.processes)
            _check_begun(path, requested, parsed.processes)
    several = ["--processes", str(parsed.processes)] if parsed.processes > 1 else []
    program = [sys.executable, "-P", "-m", "evorl", "train", *several, str(file), *assignments]
    commands = [
        (number, [*program, f"seed={number}", assignment("run.name", full), "run.resume=auto"])
        for number, full in names
    ]
    codes = train_each(commands, name)
    print("\n".join(summary_lines([(number, path) for number, path in runs if (path / CONFIG).is_file()])))
    if failed := [str(number) for number, code in codes.items() if code]:
        raise RunFailed(f"seed {', '.join(failed)} did not finish; repeat the command to resume")


def _check_begun(path: Path, config: AnyConfig, processes: int) -> None:
    """Raise UserError if the run in `path` has other settings than `config`, or was trained on another number of
    processes, where that changes the updates: its results cannot be averaged with those of the other seeds."""
    check_same_run(path, config)
    begun, last, most = read_config(path / CONFIG, ()), read_overview(path).last, config.training.max_steps
    is_alike = config.algorithm.split_batches or config.population.placement == "sharded"
    # A run may have gone a little beyond its last step.
    is_longer = most < min(begun.training.max_steps, _number(last, "agent_steps"))
    # A resumed run may change these, but results with both cannot be averaged.
    for key, was, now in (
        ("network.bf16", bool(begun.network.bf16), bool(config.network.bf16)),
        ("evaluation.max_steps", begun.evaluation.max_steps, config.evaluation.max_steps),
        ("population.placement", begun.population.placement, config.population.placement),
        ("training.max_steps", begun.training.max_steps if is_longer else most, most),
        ("number of processes", processes if is_alike else last.get("ranks", processes), processes),
    ):
        if was != now:
            raise UserError(f"run.resume: {path} was started with another {key}; choose another --name")


def train_each(commands: Sequence[tuple[int, Sequence[str]]], group: str) -> dict[int, int]:
    """Run the command of each seed, one after the other, and return the exit codes by seed.

    W&B shows the runs as this group, unless WANDB_RUN_GROUP is set. On a signal, the run in progress shuts down cleanly
    and keeps its checkpoints, and no other begins.
    """
    environment = {"WANDB_RUN_GROUP": group, **with_this_package()}
    codes = {}
    for number, command in commands:
        say(f"seed {number}:")
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
            try:
                codes[number] = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
    return codes


def summary_lines(runs: Sequence[tuple[int, Path]]) -> list[str]:
    """Format one row per seed, then the mean over seeds of the best agents' scores and the number solved."""
    rows, best, solved, targets = [], [], 0, 0
    for number, path in runs:
        record = read_overview(path)
        # A seed that was killed has no summary, but lines of metrics.
        summary, newest = record.summary, {**record.last, **record.summary}
        reached = summary.get("elite_fitness")
        if reached is not None:
            best.append(reached)
        targets += summary.get("solved") is not None
        solved += summary.get("solved") is True
        rows.append((
            str(number), path.name, "-" if reached is None else digits(reached),
            str(summary.get("elite_episodes", "-")), f"{newest.get('agent_steps', 0):,}",
            f"{newest.get('wall_clock_seconds', 0):.0f}", state_of(record),
        ))  # fmt: skip
    return [*map(on_one_line, aligned([HEADINGS, *rows])), _together(best, solved, targets, len(runs))]


def _together(best: Sequence[float], solved: int, targets: int, number: int) -> str:
    from evorl.report.statistics import interval

    words = f"no seed of {number} has an agent"
    if best:
        _, mean, low, high = interval(best)
        spread = "" if low is None or high is None else f" (95 % interval {digits(low)} to {digits(high)})"
        words = f"best agents of {len(best)} seed{'s' if len(best) > 1 else ''}: mean {digits(mean)}{spread}"
    return f"{words}; solved: {solved} of {number}" if targets else words
