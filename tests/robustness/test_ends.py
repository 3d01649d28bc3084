"""How processes end: with the right exit code, whatever their threads do."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence

import pytest
from helpers.support import ROOT

from evorl.runs import program
from evorl.system.signals import Interrupted, signal_handlers, signals_deferred
from evorl.types.outcomes import RunFailed

VARIABLES = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


ENDS = """
import atexit, json, os, sys, threading, time
from evorl.runs import program

program.END_WITHIN = 0.3
program.ATEXIT_WITHIN = 2

def tell_late(seconds):
    time.sleep(seconds)
    print("uploaded", file=sys.stderr)

def left(seconds, code, late=0):
    (reader, writer), process = os.pipe(), os.fork()  # The imports are shared.
    if not process:
        os.dup2(writer, sys.stderr.fileno())
        threading.Thread(target=time.sleep, args=(seconds,), name="simulator").start()
        program.limit_end(code)
        if late:
            atexit.register(tell_late, late)
        sys.exit(code)
    os.close(writer)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with os.fdopen(reader) as said:
        return code, said.read()

print(json.dumps([left(60, 3), left(0.0, 0), left(0.0, 0, late=1), left(0.0, 0, late=60)]))
"""


def test_thread_of_an_environment_does_not_hold_the_process_and_is_named():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ENDS], env=VARIABLES, capture_output=True, text=True, check=True)
    hanging, ending, late, endless = json.loads(done.stdout)
    assert hanging[0] == 3
    assert hanging[1].startswith(
        "warning: threads still run 0.3 s after the program's end ('simulator'), and the process ends without them; "
    )
    assert ending == [0, ""]
    assert late == [0, "uploaded\n"]
    assert endless[1].startswith("warning: functions registered by `atexit` still run after 2 s")
    assert time.monotonic() - began < 40


SLOW_TO_TELL = """
import os, time
from evorl.types.outcomes import UserError

if os.environ["RANK"] == "0":
    time.sleep(2)
raise UserError("a mistake")
"""


@pytest.mark.two_process
def test_a_mistake_is_told_once_although_the_rank_that_tells_it_is_the_last_to_see_it(tmp_path, forked_launch):
    done = forked_launch(tmp_path, instead=SLOW_TO_TELL)
    assert done.returncode == 1
    assert done.stderr.count("error: a mistake\n") == 1


def test_a_deferred_signal_raises_at_the_end_of_the_outermost_block():
    reached = []

    def told():
        with signal_handlers(), signals_deferred():
            with signals_deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                reached.append("inner")
            reached.append("outer")

    with pytest.raises(Interrupted) as caught:
        told()
    assert reached == ["inner", "outer"]
    assert caught.value.code == 128 + signal.SIGTERM


FINALISED = """
import os, signal
from evorl.system.signals import Interrupted, raise_if_signalled, signal_handlers

class Handle:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

with signal_handlers():
    Handle()
    print("goes on")
    raise_if_signalled()
"""


def test_a_signal_in_a_finaliser_ends_the_program_without_a_traceback():
    """Python swallows exceptions there, and prints them."""
    done = subprocess.run([sys.executable, "-c", FINALISED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "goes on\n", "")


STUCK = """
import ctypes, os, signal, sys
from evorl.system import signals

signals.GRACE = signals.HOLDS_LOCK = 0.5
exec(compile(sys.argv[1], "simulator.py", "exec"))
with signals.signal_handlers(), signals.signals_deferred(lambda: "a resumed run starts over"):
    signals.note_activity("a step of Sim-v0")
    step()
"""


@pytest.mark.parametrize(
    ("hangs", "code", "line"),
    [
        (
            "while True: pass",
            128 + signal.SIGTERM,
            "(simulator.py:3 in step) 0.5 s after SIGTERM, and is ended by force; a resumed run starts over\n",
        ),
        ("ctypes.PyDLL(None).sleep(100)", 1, 'File "simulator.py", line 3 in step'),
    ],
    ids=["Python", "C"],
)
def test_a_call_that_does_not_return_after_a_signal_is_named_and_ended(hangs, code, line):
    step = f"def step():\n    os.kill(os.getpid(), signal.SIGTERM)\n    {hangs}\n"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK, step], env=VARIABLES, capture_output=True, text=True)
    assert done.returncode == code
    assert line in done.stderr
    assert code == 1 or done.stderr.startswith("error: the process is still in a step of Sim-v0 (")
    assert time.monotonic() - began < 30


def test_a_signal_as_a_failure_closes_the_run_does_not_hide_the_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """As a launcher sends it to the other ranks when one has ended; a failure of which it is the cause stays untold."""

    def fail(arguments: Sequence[str]) -> None:
        try:
            raise RunFailed("rank 1 has ended")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(arguments: Sequence[str]) -> None:
        try:
            raise RunFailed("a process of an environment has ended")
        except RunFailed as error:
            raise Interrupted(signal.SIGTERM) from error

    assert program.run_program(fail, []) == 1
    assert capsys.readouterr().err == "error: rank 1 has ended\n"
    assert program.run_program(end, []) == 128 + signal.SIGTERM
    assert not capsys.readouterr().err


def test_nothing_of_a_program_ended_by_a_signal_outlives_it() -> None:
    """The environments are in a cycle with the exception; ALE's binding prints what is left when Python ends."""

    class Environments:
        pass

    held: list[weakref.ref[Environments]] = []

    def main(arguments: Sequence[str]) -> None:
        environments = Environments()
        held.append(weakref.ref(environments))
        error = Interrupted(signal.SIGTERM)  # This frame refers to it, and it to this frame.
        raise error

    gc.disable()
    try:
        assert program.run_program(main, []) == 128 + signal.SIGTERM
    finally:
        gc.enable()
    assert held[0]() is None
