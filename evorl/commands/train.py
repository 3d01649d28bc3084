"""`evorl train`: train a population on one process or, with Accelerate's launcher, on several."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from evorl.commands.command import Command, count, seed
from evorl.commands.launching import launch_command
from evorl.commands.words import add_words, file_and_assignments
from evorl.config.shipped import read_settings
from evorl.runs.launch import check, read_config
from evorl.runs.programs import main_of, program_for


def program_arguments(words: Sequence[str], seed: int | None, name: str | None) -> list[str]:
    """Convert the command line to the arguments of the training program. Raises UserError."""
    file, given = file_and_assignments(words)
    given += [] if seed is None else [f"seed={seed}"]
    given += [] if name is None else [f"run.name={json.dumps(name, ensure_ascii=False)}"]
    return ["--config", str(file), *given]


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser)
    parser.add_argument("--processes", type=count, default=1, help="processes to train with (default: 1)")
    parser.add_argument("--seed", type=seed, help="short for seed=N")
    parser.add_argument("--name", help="the run's directory below runs/; short for run.name=NAME")


def _run(parsed: argparse.Namespace) -> None:
    arguments = program_arguments(parsed.words, parsed.seed, parsed.name)
    program = program_for(read_settings(Path(arguments[1]), arguments[2:]))
    if parsed.processes == 1:
        main_of(program)(arguments)
        return
    # Check first: otherwise every process would find the same error, and the launcher would add a traceback for each.
    check(read_config(Path(arguments[1]), arguments[2:]))
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
