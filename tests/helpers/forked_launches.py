"""Launches whose ranks are forked from one process that has imported everything: each takes 1 s instead of 3.5.

They differ from those of `accelerate launch` in nothing else that a rank sees; `tests/robustness/launches.py` has the
stand-in for the launcher.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from helpers import forked_servers
from helpers.support import ROOT, SMALL, demo, fitting, program_for

LIMIT = 180.0
"""Seconds after which a launch is given up."""


@dataclass(frozen=True)
class Done:
    returncode: int
    stderr: str


class ForkedLaunches:
    """The process that forks; it ends with this object's."""

    def __init__(self):
        places = (ROOT, ROOT / "tests", ROOT / "tests" / "robustness")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, places))}
        words = [sys.executable, "-m", "helpers.forked_launches"]
        self._process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT / "tests"
        )

    def __call__(
        self, directory, *overrides, processes=2, configuration=SMALL, first="", instead="", no_rank="", restarts=0,
        stop_at=None, stop_with=signal.SIGTERM,
    ):  # fmt: skip
        """Run the demo in `directory`, as `support.launch` does.

        Each rank executes `first` before, which may change its `arguments`, or it executes `instead` in place of the
        demo. The ranks get a signal, `stop_with`, once a file is there that matches `stop_at`. Without ranks, one
        process that has no threads executes `no_rank`, which sets `code`.
        """
        log = Path(directory) / "launch.log"
        log.unlink(missing_ok=True)
        settings = list(overrides)
        if configuration:
            settings = ["--config", str(configuration), *fitting(overrides)]
        program = program_for(configuration or SMALL, fitting(overrides))
        asked = {
            "directory": str(directory), "ranks": processes, "program": program, "settings": settings, "first": first,
            "instead": instead, "no_rank": no_rank, "restarts": restarts, "stop_at": stop_at, "stop_with": stop_with,
        }  # fmt: skip
        json.dump(asked, self._process.stdin)
        print(file=self._process.stdin, flush=True)
        code = json.loads(self._process.stdout.readline())
        return Done(code, log.read_text(errors="replace"))

    def well(self, *arguments, **options):
        """A launch that must end without an error."""
        done = self(*arguments, **options)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def close(self):
        self._process.stdin.close()
        self._process.wait(LIMIT)


def after(first, main, arguments):
    """Execute a program, and then be the demo."""
    exec(first, {"arguments": arguments})
    main(arguments)


def only(program, arguments):
    """Execute a program and nothing else."""
    exec(program, {})


def code_of(program):
    """Execute a program, and return its exit code."""
    names = {}
    exec(program, names)
    return names["code"]


def heed_signals():
    """Undo what nohup has done, as ranks rightly go on ignoring a signal that was ignored at their start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def serve():
    """Read launches from the standard input, one a line, and answer each with its exit code."""
    # Only here: the client must not import what a process without threads should import first.
    from launches import fork_launch, fork_logged
    from timeline import Timeline

    from evorl.actors import server
    from evorl.runs.launch import load_config

    heed_signals()
    os.fsync = lambda descriptor: None  # As in the tests' own process.
    server.subprocess = forked_servers.patched()
    programs = {path: demo(path) for path in ("demos/online.py", "demos/asynchronous.py")}
    load_config([], SMALL)
    for line in sys.stdin:
        asked = json.loads(line)
        place, ranks, first, stop_at = Path(asked["directory"]), asked["ranks"], asked["first"], asked["stop_at"]
        timeline = Timeline(place / "timeline", fresh=True)
        main = programs[asked["program"]]
        if asked["instead"]:
            main = partial(only, asked["instead"])
        elif first:
            main = partial(after, first, main)
        log = place / "launch.log"
        if asked["no_rank"]:
            launched = fork_logged(partial(code_of, asked["no_rank"]), place, log)
        else:
            launched = fork_launch(main, place, log, timeline, asked["settings"], ranks, asked["restarts"])
        deadline = time.monotonic() + LIMIT
        while (code := launched.poll()) is None and time.monotonic() < deadline:
            if stop_at and any(place.glob(stop_at)):
                for pid in timeline.pids(ranks):
                    with contextlib.suppress(ProcessLookupError):  # It may just have ended.
                        os.kill(pid, asked["stop_with"])
                stop_at = None
            time.sleep(0.005)
        if code is None:
            os.killpg(launched.pid, signal.SIGKILL)
        print(json.dumps(-1 if code is None else code), flush=True)


if __name__ == "__main__":
    serve()
