"""Runs that somebody sends and command lines that somebody mistypes: refused in one line, or done as they say."""

import importlib.util
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fuzz
import numpy as np
import pytest
from fuzz_places import configure
from fuzz_readers import COMMANDS
from fuzz_rooms import RUN, Case, nothing
from fuzz_watch import Limits, unsafe

from evorl.commands import command as evorl_commands
from evorl.types import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")
EACH, EACH_READER = 4, 2
FOUND = (
    3, 9, 33, 35, 60, 77, 101, 110, 168, 173, 213, 280, 335, 350, 378, 414, 487, 585, 588, 613, 643, 909, 1017, 1455,
    1551, 1709, 2274, 2313, 2816, 5669, 6249,
)  # fmt: skip
"""Inputs that have broken a promise; the first ones are among those that the short form tries."""
EVALUATE = ("evaluate", RUN)


EXTRAS = ("matplotlib", "plotly", "jinja2", "onnx", "onnxruntime", "av", "pygame")
"""Packages without which some commands end before they read a run."""
HAS_EXTRAS = all(importlib.util.find_spec(name) is not None for name in EXTRAS)


@pytest.fixture(scope="module")
def bench():
    with fuzz.workshop(fuzz.warm if HAS_EXTRAS else None) as made:
        yield made


def check(bench, number, families=fuzz.FAMILIES):
    case = fuzz.drawn(bench, number, seed=1, families=families)
    outcome = bench.tried(case)
    assert not outcome.problems, (number, case.family, outcome.stderr[-2000:])
    assert outcome.code in (0, 2)


@pytest.mark.parametrize("place", range(len(fuzz.FAMILIES)))
def test_hostile_inputs_are_refused_or_obeyed(place, bench):
    """The short form of fuzz.py."""
    for number in range(place, EACH * len(fuzz.FAMILIES), len(fuzz.FAMILIES)):
        check(bench, number)


@pytest.mark.parametrize("place", range(len(fuzz.ANCESTRY)))
def test_hostile_lineages_are_refused_or_followed(place, bench):
    """The short form of `fuzz.py --of ancestry`."""
    for number in range(place, EACH * len(fuzz.ANCESTRY), len(fuzz.ANCESTRY)):
        check(bench, number, fuzz.ANCESTRY)


@pytest.mark.skipif(not HAS_EXTRAS, reason="not all optional packages are installed")
@pytest.mark.parametrize("place", range(len(fuzz.READERS)))
def test_spoiled_runs_are_refused_or_read_by_every_command(place, bench):
    """The short form of `fuzz.py --of readers`."""
    for number in range(place, EACH_READER * len(fuzz.READERS), len(fuzz.READERS)):
        check(bench, number, fuzz.READERS)


@pytest.mark.skipif(not HAS_EXTRAS, reason="not all optional packages are installed")
@pytest.mark.parametrize("place", range(len(fuzz.READERS)))
def test_every_command_reads_a_whole_run(place, bench):
    """Where the runs that are tried were refused for what is wrong with all of them, nothing would be tried."""
    outcome = bench.tried(replace(fuzz.drawn(bench, place, seed=1, families=fuzz.READERS), prepare=nothing))
    assert (outcome.code, outcome.problems) == (0, []), outcome.stderr


def test_every_command_that_reads_a_run_is_tried():
    others = {"completion", "check", "match", "play"}  # The last two read runs by `evorl.load`, which is tried.
    assert {command[0] for command in COMMANDS.values()} == set(evorl_commands.COMMANDS) - others


def test_a_run_that_hides_another_is_seen(bench, monkeypatch):
    monkeypatch.setattr("evorl.commands.inspect.rows_of_runs", lambda directory: [])
    case = fuzz.drawn(bench, 0, seed=1, families=fuzz.READERS)
    assert case.family == "list"
    assert any("stdout does not match" in problem for problem in bench.tried(case).problems)


@pytest.mark.parametrize("number", [number for number in FOUND if number >= EACH * len(fuzz.FAMILIES)])
def test_what_broke_a_promise_once_does_so_no_more(number, bench):
    check(bench, number)


def test_every_family_has_a_name_of_its_own(bench):
    names = [fuzz.drawn(bench, number, seed=1).family for number in range(len(fuzz.FAMILIES))]
    assert len(names) - len(set(names)) == 1, "names of code are drawn twice as often"


@pytest.mark.parametrize("place", range(0, len(fuzz.FAMILIES), 12))
def test_the_same_number_is_the_same_input(place, bench):
    first, again = (fuzz.drawn(bench, place, seed=3) for _ in range(2))
    assert first.arguments == again.arguments
    outcomes = [bench.tried(case) for case in (first, again)]
    assert outcomes[0].code == outcomes[1].code
    # Directories have names of their own, and what goes on says how long it takes.
    begins = [re.sub(r"/tmp\w+/", "/", outcome.stderr).partition("\n")[0] for outcome in outcomes]
    assert begins[0] == begins[1]


def test_a_whole_run_is_evaluated_and_gone_on_with(bench):
    evaluated = bench.tried(Case("whole", (*EVALUATE, "--episodes", "2")))
    assert (evaluated.code, evaluated.problems) == (0, [])
    assert "over 2 fresh episodes" in evaluated.stdout
    resumed = bench.tried(Case("whole", ("resume", RUN, "training.max_steps=200"), goes_on=True))
    assert (resumed.code, resumed.problems) == (0, [])
    assert "error: " not in resumed.stderr


def names_code(room):
    configure(room, environment={"id": "evilmod:CartPole-v1"})


def test_code_that_is_executed_is_seen(bench, monkeypatch):
    case = Case("code", EVALUATE, names_code, inside=True)
    outcome = bench.tried(case)
    assert (outcome.code, outcome.problems) == (2, [])
    monkeypatch.setattr("evorl.commands.evaluate.refuse_code", lambda run, allowed: None)
    problems = bench.tried(case).problems
    assert "code of the run was executed: canary-evilmod" in problems
    assert "the working directory is on sys.path" in problems


def waits(*given):
    time.sleep(30)


def takes_memory(*given):
    fresh = np.frombuffer(mmap.mmap(-1, 240_000_000), np.uint8)  # What the process has freed would not count.
    fresh[:] = 1
    raise UserError(str(fresh.sum()))


def writes(*given):
    Path("left").write_text("x")


def removes(*given):
    Path("outside/thesis/text").unlink()


def connects(*given):
    socket.create_connection(("127.0.0.1", 9))


def starts(*given):
    subprocess.run([sys.executable, "-c", ""], check=True)


def says_much(*given):
    print("error: " + "x" * 30_000, file=sys.stderr)
    raise SystemExit(2)


def says_it_twice(*given):
    print("error: x", file=sys.stderr)
    raise UserError("x")


def clears_the_screen(*given):
    print("error: \x1b[2J", file=sys.stderr)
    raise SystemExit(2)


def dies(*given):
    os.kill(os.getpid(), signal.SIGKILL)


BROKEN = {
    waits: "still runs after 0.5 s",
    takes_memory: "took 2",
    writes: "writes outside the run: open",
    removes: "writes outside the run: os.remove",
    connects: "asks the network",
    starts: "starts a program",
    says_much: "an error of 30007 letters",
    says_it_twice: "exit code 2 with 2 lines of error",
    clears_the_screen: "letters on the terminal that cannot be printed",
    dies: "the process ended with -9",
    time.sleep: "a traceback from evorl/commands/evaluate.py",
}


@pytest.mark.parametrize(("change", "problem"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_promise_that_is_broken_is_seen(change, problem, bench, monkeypatch):
    monkeypatch.setattr("evorl.commands.evaluate.evaluate_elite", change)
    limits = Limits(seconds=0.5 if change is waits else 5.0, megabytes=100)
    outcome = bench.tried(Case("broken", EVALUATE), limits)
    assert any(each.startswith(problem) for each in outcome.problems), outcome


@pytest.mark.parametrize(
    ("command", "safe"),
    [
        (["python", "program.py", "-m", "x"], True),
        (["python", "-m", "accelerate", "program.py"], False),
        (["python", "-P", "-m", "accelerate"], True),
        (["python", "-I", "-m", "accelerate"], True),
        (["python", "-m", "accelerate", "-P"], False),
    ],
)
def test_a_command_that_imports_what_lies_around_is_seen(command, safe, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert (unsafe(command) == "") is safe
