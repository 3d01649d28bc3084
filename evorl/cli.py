"""`evorl`: train, and look at what a run has left behind; `evorl.commands` has a file for each command."""

from __future__ import annotations

import sys

from evorl.commands.overview import HELP, overview


def main() -> int:
    """Run the console script."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in HELP:
        print(overview())
        return 0
    # Here, since torch takes seconds, which nobody who asks for help should wait.
    from evorl.commands.command import run_command
    from evorl.runs.launch import run_program

    return run_program(run_command, arguments)
