"""The definition of a command, and arguments shared by several commands."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evorl.commands import COMMANDS
from evorl.commands.overview import HELP, overview
from evorl.config import check_name
from evorl.config.errors import shown
from evorl.config.reader import plain_assignments
from evorl.runs.launch import Parser
from evorl.system.files import reason
from evorl.types import UserError


@dataclass(frozen=True)
class Command:
    """A command: `arguments` adds its arguments to a parser, `run` executes it. Raises UserError, OSError."""

    run: Callable[[argparse.Namespace], None]
    arguments: Callable[[argparse.ArgumentParser], None]
    examples: Sequence[str]


def command_named(name: str) -> Command:
    """Import a command by name. Raises UserError if there is none of this name."""
    check_name("evorl", name, COMMANDS)
    found: Command = importlib.import_module(f"evorl.commands.{name}").COMMAND
    return found


def parser_of(name: str) -> Parser:
    """Return the argument parser of a command. Raises UserError if there is no such command."""
    command = command_named(name)
    examples = "\n".join(f"  {example}" for example in command.examples)
    parser = Parser(
        prog=f"evorl {name}",
        description=COMMANDS[name],
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.arguments(parser)
    return parser


def run_command(arguments: Sequence[str]) -> None:
    """Parse a command line and run its command. Raises UserError."""
    name, *rest = arguments or ["--help"]
    if name in HELP:
        print(overview())
        return
    parser = parser_of(name)
    parsed = parser.parse_intermixed_args(plain_assignments(rest))
    try:
        command_named(name).run(parsed)
    except OSError as error:
        raise UserError(reason(error, getattr(parsed, "run", Path()))) from error


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run's directory and `--allow-code`."""
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--allow-code", action="store_true", help="let the run's configuration name code to run")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `key.path=value` arguments, which override settings."""
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")


def seed(text: str) -> int:
    return _within(text, 0, 2**63)


def count(text: str) -> int:
    return _within(text, 1, 1_000_000)


def _within(text: str, least: int, most: int) -> int:
    value = int(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{shown(value)} is out of range; it must be {least} to {most}")
    return value
