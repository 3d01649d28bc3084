"""Runs of two processes that are killed, stopped or hung."""

import re
import time

import chaos
import numpy as np
import pytest
import restarts
from helpers.support import ROOT, launch, lines

SHORT = (*chaos.CASES["dqn-replicated"], "training.max_steps=1600")


@pytest.mark.two_process
def test_a_run_whose_launcher_is_killed_ends_as_one_left_alone(tmp_path, forked_launch):
    """The short form of chaos.py. Ranks die below, of launchers that restart."""
    rng = np.random.default_rng(0)

    def train(*settings):
        done = forked_launch(tmp_path, *SHORT, *settings, configuration=None)
        assert done.returncode == 0, done.stderr[-3000:]

    train("run.name=alone")
    kills = chaos.disturb(tmp_path, "killed", SHORT, 1, rng, lambda: train("run.name=killed", "run.resume=auto"))
    assert [kill.victim for kill in kills] == ["launcher"]
    assert kills[0].seconds_to_end < 30
    assert chaos.differences(tmp_path / "runs" / "alone", tmp_path / "runs" / "killed") == []
    assert len(chaos.left_behind(tmp_path / "runs" / "alone")["metrics.jsonl"]) == 5


HANGING = """
import os, signal, sys, time
sys.path[:0] = ["{root}/demos"]
import online
from evorl.runs.program import run_program
from evorl.runs.run import Run

record, end = Run.record, Run.__exit__

def hang(self, *arguments):
    record(self, *arguments)
    if self.ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

def ended(self, *error):
    end(self, *error)
    if self.ranks.is_main:
        time.sleep(3)  # A busy machine takes long to come to the report, and the launcher must not end it before.
        print("ending at", time.time(), flush=True)

Run.record, Run.__exit__ = hang, ended
sys.exit(run_program(online.main, sys.argv[1:]))
"""


RESTARTED = (
    "training.max_steps=480", "evolution.steps=96", "replay.learning_starts=40", "evaluation.max_steps=40",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory, forked_launch):
    """A run like those whose launchers restart, which nobody has killed."""
    directory = tmp_path_factory.mktemp("alone")
    done = forked_launch(directory, *restarts.SETTINGS, *RESTARTED, "run.name=alone", configuration=None)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory / "runs" / "alone"


@pytest.mark.two_process
@pytest.mark.parametrize("launcher", restarts.LAUNCHERS)
def test_a_launcher_that_restarts_ends_with_the_same_run_and_locks_it_meanwhile(launcher, tmp_path, alone):
    """The short form of restarts.py: a second trainer and `evorl clean --yes` are refused, and nothing is deleted.

    Without a name the directory is that of the first attempt, and `run.resume` need not be set.
    """
    output, found = restarts.launch(tmp_path, "", 1, launcher, *RESTARTED)
    assert found == ["held"]
    (run,) = (tmp_path / "unnamed").iterdir()
    rows = lines(run / "metrics.jsonl")
    assert [row["generation"] for row in rows] == list(range(1, len(rows) + 1))
    assert chaos.differences(alone, run) == []
    killed, training = (
        [float(at) for at in re.findall(rf"{what} at ([\d.]+)", output)] for what in ("killed", "training")
    )
    assert len(killed) == 1
    assert training[1] - killed[0] < 60


@pytest.mark.two_process
def test_a_rank_that_hangs_is_named_and_ends_the_job_in_time(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HANGING.format(root=ROOT))
    started = time.monotonic()
    done = launch(tmp_path, "run.name=a", "run.timeout=8", program=program)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    assert re.search(r"rank 0 waited for .*, but rank 1 on .* has sent no heartbeat .*8 s, run.timeout", lines[0])
    assert time.monotonic() - started < 90
    (ending,) = re.findall(r"ending at ([\d.]+)", done.stdout)
    assert time.time() - float(ending) < 25, "the launcher waited for the rank that hangs, as it does for 30 s"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
