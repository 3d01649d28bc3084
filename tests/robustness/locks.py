"""Kill the process that trains a run, a thousand times after a restart, and try to get at the run each time before.

    OMP_NUM_THREADS=1 python tests/robustness/locks.py [--kills 1000]

An attempt is a forked copy of this process: no launcher is started and nothing is trained. It claims the run's
directory by the code that rank 0 runs (`RunDirectory.claim`, under the name of its launch), adds a generation's line,
and forks a child that outlives it, as the processes of environments can. While it waits to be killed, a second trainer
claims the directory with `run.resume=auto`, and `evorl clean --yes` is called: both must be refused, and the checkpoint
must still be there. Then it is killed, and the launch's next attempt follows. restarts.py does the same with launches.

Prints how often the lock was held; exits with 1 unless it was each time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from launches import Forked

from evorl.algorithms import SETTINGS
from evorl.commands.inspect import clean
from evorl.config import AnyConfig, validate
from evorl.distributed import Launch
from evorl.runs import directory as run_directory
from evorl.runs.directory import Owner, RunDirectory
from evorl.runs.json_lines import JsonLines
from evorl.types import UserError

DEADLINE = 60.0
"""Seconds that an attempt has to claim the directory."""
HELD, REFUSED = "held", "refused"


def settings(directory: Path, resume: str) -> AnyConfig:
    """Return a configuration whose run is named in every other launch's directory."""
    run = {"directory": str(directory), "name": "a", "resume": resume}
    return validate({"environment": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}, "run": run}, SETTINGS)


def linger() -> int:
    """Outlive the attempt."""
    time.sleep(DEADLINE)
    return 0


def attempt(config: AnyConfig, number: int, writing: int) -> int:
    """Claim the run as rank 0 of a launch's attempt does, and wait to be killed."""
    run = RunDirectory.claim(config, Owner.here(Launch("a launch", restarted=number > 0)))
    if number == 0:
        run.checkpoints.complete(1, {"state.json": run.checkpoints.write(1, "state.json", b"{}")})
    run.metrics.add([{"generation": number + 1}])
    run.flush()
    child = Forked(linger)
    os.write(writing, f"{child.pid}\n".encode())
    signal.pause()
    return 1


def second_trainer(config: AnyConfig) -> str:
    """Return `refused`, or what became of another launch that wants to train the run."""
    try:
        with patch.object(run_directory, "LOCK_PATIENCE", 0.0):
            RunDirectory.claim(config, Owner.here(Launch("another", restarted=False))).release()
    except UserError as error:
        return REFUSED if "is in use by process" in str(error) else str(error)
    return "let in"


def cleaned(run: Path) -> str:
    """Return `refused`, or what `evorl clean --yes` said."""
    try:
        return clean(run, delete=True)
    except UserError as error:
        return REFUSED if "is still training" in str(error) else str(error)


def attacked(run: Path, trainer: AnyConfig) -> str:
    """Return `held`, or what a second trainer and `clean` could do to a run that trains."""
    done = {"clean": cleaned(run), "second trainer": second_trainer(trainer)}
    wrong = [f"{who}: {what}" for who, what in done.items() if what != REFUSED]
    if not any((run / "checkpoints").glob("generation-*")):
        wrong.append("the checkpoint is gone")
    return "; ".join(wrong) or HELD


def kill_each(directory: Path, kills: int) -> Counter[str]:
    """Return how often a restarted attempt had the run locked until it was killed, and what was possible else."""
    first, trainer = settings(directory, "never"), settings(directory, "auto")
    found: Counter[str] = Counter()
    before: list[int] = []
    for number in range(kills + 1):
        reading, writing = os.pipe()
        process = Forked(lambda: attempt(first, number, writing), dies_with_parent=True)  # noqa: B023 (forked at once)
        os.close(writing)
        with os.fdopen(reading) as answer:
            child = int(answer.readline() or 0)
        # What the attempt before left behind lives until here, and has not kept its lock.
        for orphan in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        before = [child] if child else []
        if number:
            found[attacked(directory / "a", trainer) if child else "the attempt could not claim it"] += 1
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        while process.poll() is None:
            time.sleep(0.0005)
    for orphan in before:
        os.kill(orphan, signal.SIGKILL)
    there = [row["generation"] for row in JsonLines(directory / "a" / "metrics.jsonl").rows()]
    if there != list(range(1, kills + 2)):
        found["lines of metrics.jsonl are doubled or missing"] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    kills = parser.parse_args().kills
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = kill_each(Path(directory), kills)
    for what, count in found.most_common():
        print(f"{count} of {kills}: {what}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if found == Counter({HELD: kills}) else 1


if __name__ == "__main__":
    sys.exit(main())
