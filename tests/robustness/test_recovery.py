"""Runs of two processes that are restarted by their launcher, or that hang."""

import re
import shutil
import time

import pytest
from comparison import differences
from helpers.support import ROOT, launch, lines

SETTINGS = ("training.max_steps=200", "run.timeout=60")
RESTARTED = """
import os, signal, sys
sys.path[:0] = ["{root}/demos"]
import online
from evorl.commands.command import run_command
from evorl.distributed import Launch
from evorl.runs.storage import directory
from evorl.runs.program import run_program
from evorl.runs.run import Run
from evorl.types.outcomes import UserError

record = Run.record
directory.LOCK_PATIENCE = 0.0

def refused(work):
    try:
        work()
    except UserError as error:
        print("refused:", error, flush=True)

def recorded(self, *arguments):
    record(self, *arguments)
    if self.progress.generation == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif self.progress.generation == 3 and self.ranks.is_main:
        resumed = self.config.model_copy(update={{"run": self.config.run.model_copy(update={{"resume": "auto"}})}})
        refused(lambda: directory.RunDirectory.claim(resumed, Launch("another", restarted=False)))

Run.record = recorded
sys.exit(run_program(online.main, sys.argv[1:]))
"""


@pytest.mark.two_process
def test_restarted_run_ends_as_undisturbed_and_is_locked_meanwhile(tmp_path, forked_launch):
    """After a rank is killed, `--max_restarts` starts both again; another trainer is refused."""
    forked_launch.well(tmp_path, *SETTINGS, "run.name=a")
    undisturbed = shutil.move(tmp_path / "runs" / "a", tmp_path / "undisturbed")
    (tmp_path / "program.py").write_text(RESTARTED.format(root=ROOT))
    done = launch(tmp_path, *SETTINGS, "run.name=a", program=tmp_path / "program.py", arguments=("--max_restarts", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    refusals = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert ["is in use by process" in line for line in refusals] == [True]
    run = tmp_path / "runs" / "a"
    assert [row["generation"] for row in lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert differences(run, undisturbed) == []


HANGING = """
import os, signal, sys, time
sys.path[:0] = ["{root}/demos"]
import online
from evorl.runs.program import run_program
from evorl.runs.run import Run

record = Run.record

def hang(self, *arguments):
    record(self, *arguments)
    if self.ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

Run.record = hang
sys.exit(run_program(online.main, sys.argv[1:]))
"""


@pytest.mark.two_process
def test_hanging_rank_is_named_and_ends_the_job_in_time(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HANGING.format(root=ROOT))
    started = time.monotonic()
    done = launch(tmp_path, "run.name=a", "run.timeout=8", program=program)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    assert re.search(r"rank 0 waited for .*, but rank 1 on \S+ did not arrive .*8 s, run.timeout", lines[0])
    assert time.monotonic() - started < 90
