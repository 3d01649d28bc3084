"""The console script `evorl`, also as `python -m evorl`."""

from __future__ import annotations

import signal
import sys

from evorl.commands.command import answer, mistake_in, run_command
from evorl.system.streams import discard, reader_has_gone


def main() -> int:
    """Run the command line and return its exit code: 141, as of SIGPIPE, if the reader of stdout has gone."""
    try:
        code = _code_of(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not reader_has_gone():
            raise
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # Before `run_program` handles signals.
        return 128 + signal.SIGINT
    return code


def _code_of(arguments: list[str]) -> int:
    if (text := answer(arguments)) is not None:
        print(text, end="")
        return 0
    if mistake := mistake_in(arguments[0]):
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    # Imported late: importing torch takes seconds.
    from evorl.runs.program import run_program

    return run_program(run_command, arguments)


if __name__ == "__main__":
    sys.exit(main())
