"""The `evorl` command line; `evorl.commands` has one module per command."""

from __future__ import annotations

import sys

from evorl.commands.overview import HELP, overview


def main() -> int:
    """Run the `evorl` console script and return its exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in HELP:
        print(overview())
        return 0
    # Imported late: importing torch takes seconds, and `--help` should not wait for it.
    from evorl.commands.command import run_command
    from evorl.runs.launch import run_program

    return run_program(run_command, arguments)
