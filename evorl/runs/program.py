"""The entry point of every program: argument parsing, signal handling, exit codes and one-line error messages.

It does not import torch, which takes seconds: some commands do not need it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from evorl.system.console import escape_stdout, say, warnings_on_one_line
from evorl.system.plugins import described
from evorl.system.processes import is_first_rank, keep_freed_memory
from evorl.system.signals import Interrupted, signal_handlers
from evorl.types.messages import on_one_line
from evorl.types.outcomes import RunFailed, UserError

MAX_TOLD = 20_000
"""Maximum characters of an error message."""
END_WITHIN = 5.0
"""Seconds that other threads have to end after the main thread."""
ATEXIT_WITHIN = 300.0
"""Seconds that functions registered by `atexit` have besides, in which a program may upload something."""
REPORT_AFTER = 15.0
"""Seconds that a rank waits for another rank to report an error."""


class Answered(SystemExit):
    """Raised after an option such as `--help` that prints an answer and exits."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise Answered(status)


def is_initialized() -> bool:
    """True if this process has joined a process group; False if the module that joins one is not imported."""
    ranks = sys.modules.get("evorl.distributed.ranks")
    return ranks is not None and bool(ranks.is_initialized())


def run_program(main: Callable[[Sequence[str]], object], arguments: Sequence[str]) -> int:
    """Run `main` and return its exit code: 0, 1 for a failure, 2 for a user error, 128 + n for signal n."""
    keep_freed_memory()
    escape_stdout()
    # The final garbage collections would traverse all of torch, which takes 0.4 s.
    atexit.register(gc.freeze)
    code = 1
    try:
        code = _code_of(main, arguments)
    finally:
        if code not in (0, 2):
            # The exception's frames hold the environments in a cycle, and ALE's binding lists what is left at the end.
            gc.collect()
        if is_initialized():
            from evorl.distributed import shutdown

            shutdown()
        limit_end(code)
    return code


def _code_of(main: Callable[[Sequence[str]], object], arguments: Sequence[str]) -> int:
    try:
        with signal_handlers(), warnings_on_one_line():
            main(arguments)
    except UserError as error:
        _report(error)
        return 2
    except RunFailed as error:
        _say(on_one_line(str(error)))
        return 1
    except (Interrupted, Answered) as ending:
        if isinstance(ending.__context__, RunFailed) and ending.__cause__ is None:
            # The signal came as this failure closed the run: the launcher's, where another rank has ended.
            _say(on_one_line(str(ending.__context__)))
            return 1
        return int(ending.code or 0)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        message = on_one_line(str(error), 120)
        _say(f"{message}; lower population.size, environment.num_envs, algorithm.batch_size or replay.capacity")
        return 1
    except (SystemExit, KeyboardInterrupt) as left:
        _say(f"{described(left)} ended the run")
        return 1
    return 0


def _is_out_of_memory(error: RuntimeError) -> bool:
    torch = sys.modules.get("torch")  # Importing it takes seconds.
    return torch is not None and (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error))


def _report(error: UserError) -> None:
    """Print an error once, even if all ranks raised it.

    The launcher kills all ranks as soon as one of them exits. So a rank that leaves the report to another waits, and
    prints it itself if it has not been killed by then: the error was this rank's, or this host's, alone.
    """
    local = error.reported_elsewhere is None and is_initialized() and os.environ.get("WORLD_SIZE", "1") != "1"
    line = on_one_line(str(error), MAX_TOLD) + (f" (on rank {os.environ['RANK']})" if local else "")
    # Before the process group is initialised, no rank knows which others raised the error.
    if not error.reported_elsewhere and (is_initialized() or is_first_rank()):
        _say(line)
        return
    # The first rank of a host reports for those that raised the same error.
    patience = REPORT_AFTER + int(os.environ.get("LOCAL_RANK", "0"))
    with contextlib.suppress(Interrupted), signal_handlers():
        time.sleep(patience)
        if not error.reported_elsewhere:
            _say(line)


def _say(line: str) -> None:
    # Rank 0 closes its progress bar before this; another rank's line would be appended to the bar.
    say(("" if is_first_rank() else "\n") + f"error: {line}")


def limit_end(code: int) -> None:
    """Exit with `code`, and name other threads, if they still run END_WITHIN seconds after the main thread.

    Python would wait for ever for a thread that an environment has left running.
    """

    def end() -> None:
        threading.main_thread().join()
        time.sleep(END_WITHIN)
        others = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]
        if others:
            say(
                f"warning: threads still run {END_WITHIN:g} s after the program's end "
                f"({', '.join(map(repr, dict.fromkeys(others)))}), and the process ends without them; an environment's "
                "`close` has to end the threads that it started"
            )
        else:
            time.sleep(ATEXIT_WITHIN)
            say(f"warning: functions registered by `atexit` still run after {ATEXIT_WITHIN:g} s; the process ends now")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    threading.Thread(target=end, name="limit of the end", daemon=True).start()
