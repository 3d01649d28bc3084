"""`evorl`: train, and look at what a run has left behind; `evorl.commands` has a file for each command."""

from __future__ import annotations

import sys

from evorl.commands.command import run_command
from evorl.runs.launch import run_program


def main() -> int:
    """Run the console script."""
    return run_program(run_command, sys.argv[1:])
