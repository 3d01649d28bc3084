"""`evorl config`: the complete configuration of a command line, with the meaning of its keys."""

from __future__ import annotations

import argparse

from evorl.algorithms import SETTINGS
from evorl.commands.command import Command
from evorl.commands.words import add_words, file_and_assignments
from evorl.config import model_of
from evorl.config.described import explained, settings_of
from evorl.config.documents import commented, page
from evorl.runs.launch import read_config


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser)
    parser.add_argument("--explain", metavar="KEY", help="only what a key, or each key of a section, is for")
    parser.add_argument("--markdown", action="store_true", help="all keys of all algorithms, as docs/configuration.md")


def _run(parsed: argparse.Namespace) -> None:
    if parsed.markdown:
        print(page(SETTINGS), end="")
        return
    file, given = file_and_assignments(parsed.words)
    config = read_config(file, given)
    known = settings_of(model_of(SETTINGS[config.algorithm.name]))
    if parsed.explain is not None:
        print("\n".join(explained(known, parsed.explain)))
        return
    print(commented(config.model_dump(mode="json"), known), end="")


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=(
        "evorl config ppo population.size=8",
        "evorl config sac --explain algorithm.target_entropy",
        "evorl config --explain evolution.selection",
    ),
)
