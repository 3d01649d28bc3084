"""Positional arguments that name a configuration: an algorithm or a file, and settings to change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evorl.config.shipped import configuration_file, shipped_names
from evorl.types import UserError

WORDS = "words"
"""Their name in the parser's namespace."""


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments that name a configuration."""
    parser.add_argument(
        WORDS,
        nargs="*",
        metavar="ALGORITHM | FILE | key.path=value",
        help=f"a YAML file, or what is shipped: {', '.join(shipped_names())} (default: dqn); and settings to change",
    )


def file_and_assignments(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Split words into the configuration file and the `key.path=value` assignments. Raises UserError."""
    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise UserError(f"one algorithm or file at a time, and not {' and '.join(map(repr, named[:3]))}")
    return configuration_file(named[0] if named else "dqn").absolute(), [word for word in words if "=" in word]
