"""`evorl train`: train a population on one process or, by Accelerate's launcher, on several."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from evorl.algorithms import SETTINGS
from evorl.commands.command import Command, count, seed
from evorl.commands.launching import launch_command
from evorl.config import validate
from evorl.config.shipped import configuration_file, read_settings, shipped_names
from evorl.runs.launch import check
from evorl.runs.programs import main_of, program_for
from evorl.types import UserError


def program_arguments(words: Sequence[str], seed: int | None, name: str | None) -> list[str]:
    """Return the arguments of the training program for what stands on the command line. Raises UserError."""
    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise UserError(f"train: one algorithm or file at a time, and not {' and '.join(map(repr, named[:3]))}")
    given = [word for word in words if "=" in word]
    given += [] if seed is None else [f"seed={seed}"]
    given += [] if name is None else [f"run.name={json.dumps(name, ensure_ascii=False)}"]
    return ["--config", str(configuration_file(named[0] if named else "dqn").absolute()), *given]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="ALGORITHM | FILE | key.path=value",
        help=f"a YAML file, or what is shipped: {', '.join(shipped_names())} (default: dqn); and settings to change",
    )
    parser.add_argument("--processes", type=count, default=1, help="processes to train with (default: 1)")
    parser.add_argument("--seed", type=seed, help="short for seed=N")
    parser.add_argument("--name", help="the run's directory below runs/; short for run.name=NAME")


def _run(parsed: argparse.Namespace) -> None:
    arguments = program_arguments(parsed.words, parsed.seed, parsed.name)
    settings = read_settings(Path(arguments[1]), arguments[2:])
    program = program_for(settings)
    if parsed.processes == 1:
        main_of(program)(arguments)
        return
    # Before several processes find the same mistake, and their launcher adds a traceback for each.
    check(validate(settings, SETTINGS))
    command = launch_command([str(program), *arguments], parsed.processes)
    os.execv(command[0], command)


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=(
        "evorl train",
        "evorl train ppo environment=CartPole-v1 training.target_fitness=475 --name first",
        "evorl train sac --seed 7 population.size=8",
        "evorl train my.yaml --processes 2",
    ),
)
