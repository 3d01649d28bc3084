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
def test_a_run_that_is_killed_again_and_again_ends_as_one_left_alone(tmp_path):
    """The short form of chaos.py: a launcher and a rank die, in two phases."""
    rng = np.random.default_rng(4)
    assert chaos.disturb(tmp_path, "alone", SHORT, 0, rng) == []
    kills = chaos.disturb(tmp_path, "killed", SHORT, 2, rng)
    assert len(kills) == 2
    assert max(kill.seconds_to_end for kill in kills) < 30
    assert chaos.differences(tmp_path / "runs" / "alone", tmp_path / "runs" / "killed") == []
    assert len(chaos.left_behind(tmp_path / "runs" / "alone")["metrics.jsonl"]) == 5


RESTARTED = """
import os, signal, sys, time
sys.path[:0] = ["{root}/demos"]
import online
from evorl.runs.launch import run_program
from evorl.runs.run import Run

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
record = Run.record

def die(self, *arguments):
    record(self, *arguments)
    if "{how}" == "kill" and attempt < {kills} and self.progress.generation == attempt + 2:
        if self.ranks.rank == attempt % 2:
            print("killed at", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    if "{how}" == "stop" and self.ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

begin, end = Run.__enter__, Run.__exit__

def begun(self):
    if self.ranks.is_main:
        print("training at", time.time(), flush=True)
    return begin(self)

def ended(self, *error):
    end(self, *error)
    if "{how}" == "stop" and self.ranks.is_main:
        time.sleep(3)  # A busy machine takes long to come to the report, and the launcher must not end it before.
        print("ending at", time.time(), flush=True)

Run.record, Run.__enter__, Run.__exit__ = die, begun, ended
sys.exit(run_program(online.main, sys.argv[1:]))
"""


def program(directory, **how):
    path = directory / "program.py"
    path.write_text(RESTARTED.format(root=ROOT, **how))
    return path


@pytest.mark.two_process
@pytest.mark.parametrize("launcher", restarts.LAUNCHERS)
def test_a_run_is_locked_after_its_launcher_has_restarted(launcher, tmp_path):
    """A second trainer and `evorl clean --yes` are refused, and nothing is deleted: the short form of restarts.py."""
    _, found = restarts.launch(tmp_path, "a", 1, launcher, "training.max_steps=1280")
    assert found == ["held"]
    rows = lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert [row["generation"] for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.two_process
def test_a_launcher_that_restarts_ends_with_the_same_run(tmp_path, forked_launch):
    """Without a name the directory is that of the first attempt, and `run.resume` need not be set."""
    assert forked_launch(tmp_path, "run.name=alone", "training.max_steps=160").returncode == 0
    path = program(tmp_path, how="kill", kills=1)
    done = launch(tmp_path, "training.max_steps=160", program=path, arguments=("--max_restarts", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    alone, *others = sorted((tmp_path / "runs").iterdir(), key=lambda run: run.name != "alone")
    assert len(others) == 1
    assert chaos.differences(alone, others[0]) == []
    killed, training = (
        [float(at) for at in re.findall(rf"{what} at ([\d.]+)", done.stdout)] for what in ("killed", "training")
    )
    assert len(killed) == 1
    assert training[1] - killed[0] < 60


@pytest.mark.two_process
def test_a_rank_that_hangs_is_named_and_ends_the_job_in_time(tmp_path):
    started = time.monotonic()
    done = launch(tmp_path, "run.name=a", "run.timeout=8", program=program(tmp_path, how="stop", kills=0))
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
