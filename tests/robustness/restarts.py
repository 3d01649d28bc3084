"""Kill a rank in each of three generations under a launcher that restarts three times, ten times over.

    OMP_NUM_THREADS=1 python tests/robustness/restarts.py [--runs 10]

The launcher is `accelerate launch --max_restarts 3` and `torchrun --max-restarts 3` in turns. After each restart, while
the attempt trains, `evorl clean --yes` and a second trainer must be refused. Each run must end by itself, with no
replica drifted, and leave what an undisturbed run leaves, byte for byte. Prints how often the run was locked after a
restart, and the seconds from each kill to the moment at which training goes on; exits with 1 if a run was not locked,
fails or ends otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos import CASES, ROOT, differences, drifts
from locks import HELD, attacked

from evorl.algorithms import SETTINGS as ALGORITHMS
from evorl.config import override, read_yaml, validate
from evorl.runs.program import run_program
from evorl.runs.run import Run

RESTARTS = 3
LAUNCHERS = ("accelerate", "torchrun")
DEADLINE = 120.0
"""Seconds for a launch, and for an attack on a run that waits for it."""
SETTINGS = (*CASES["dqn-replicated"], "training.max_steps=2560")


def signs(run: Path, attempt: int) -> tuple[Path, Path]:
    """Return the files that tell that an attempt waits to be attacked, and that it was."""
    stem = run.parent.parent / f"{run.name}-{attempt}"
    return stem.with_suffix(".waits"), stem.with_suffix(".attacked")


def be_a_rank(arguments: Sequence[str]) -> int:
    """Train as demos/online.py does, but die in the generation after the one that this attempt began with.

    Before, a restarted attempt waits there until it was attacked, which a file tells.
    """
    attempt, kills = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(arguments[0])
    begin, record = Run.__enter__, Run.record

    def begun(self: Run) -> Run:
        print(f"training at {time.time()}" if self.ranks.is_main else "", flush=True)
        return begin(self)

    def die(self: Run, *counted: Any) -> None:
        record(self, *counted)
        if attempt > 0 and self.progress.generation == 2 * attempt + 2:
            waits, attacked_already = signs(self.path, attempt)
            if self.ranks.is_main:
                waits.touch()
            until = time.monotonic() + DEADLINE
            while not attacked_already.exists() and time.monotonic() < until:
                time.sleep(0.01)
        if attempt < kills and self.progress.generation == 2 * attempt + 2 and self.ranks.rank == attempt % 2:
            print(f"killed at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    Run.__enter__, Run.record = begun, die  # type: ignore[method-assign,assignment]
    spec = importlib.util.spec_from_file_location("online", ROOT / "demos" / "online.py")
    assert spec is not None
    assert spec.loader is not None
    online = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(online)
    return run_program(online.main, arguments[1:])


def launch(
    directory: Path, name: str, kills: int, launcher: str = LAUNCHERS[0], *overrides: str
) -> tuple[str, list[str]]:
    """Return the output of a launch, and what each attack found. Raises RuntimeError where it did not end well.

    Without a name, the run has the only directory of this launch's runs, below `unnamed`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launchers = {
        "accelerate": [
            "accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "accelerate" / "accelerate.yaml"),
            "--main_process_port", port, "--max_restarts", str(RESTARTS),
        ],
        "torchrun": [
            "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, "--max-restarts", str(RESTARTS),
        ],
    }  # fmt: skip
    program = [__file__, "--be-a-rank", str(kills), *SETTINGS, *overrides]
    program.append(f"run.name={name}" if name else "run.directory=unnamed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    runs = directory / ("runs" if name else "unnamed")
    with (directory / f"{name or 'unnamed'}.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *launchers[launcher], *program],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        found = attack(runs, name, process, kills)
        code = process.wait(DEADLINE)
        log.seek(0)
        output = log.read()
    if code:
        raise RuntimeError(f"{name or 'an unnamed run'} ended with {code}: {output[-3000:]}")
    return output, found


def attack(runs: Path, name: str, process: subprocess.Popen[bytes], restarts: int) -> list[str]:
    """Attack a run after each of its restarts, while it waits for that; return what was found each time."""
    found: list[str] = []
    for number in range(1, restarts + 1):
        while not (waiting := list(runs.parent.glob(f"{name or '*'}-{number}.waits"))):
            if process.poll() is not None:
                return found
            time.sleep(0.01)
        run = runs / waiting[0].name.removesuffix(f"-{number}.waits")
        _, attacked_already = signs(run, number)
        change = [f"run.directory={run.parent}", f"run.name={run.name}", "run.resume=auto"]
        trainer = validate(override(read_yaml(run / "config.yaml"), change), ALGORITHMS)
        found.append(attacked(run, trainer))
        attacked_already.touch()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    seconds: list[float] = []
    found: Counter[tuple[str, str]] = Counter()
    alike = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        launch(directory, "alone", 0)
        for number in range(runs):
            launcher = LAUNCHERS[number % len(LAUNCHERS)]
            output, attacks = launch(directory, f"killed-{number}", RESTARTS, launcher)
            found.update((launcher, what) for what in attacks)
            killed, training = (
                [float(at) for at in re.findall(rf"{what} at ([\d.]+)", output)] for what in ("killed", "training")
            )
            seconds += [after - before for before, after in zip(killed, training[1:], strict=True)]
            pair = [directory / "runs" / name for name in ("alone", f"killed-{number}")]
            same = not differences(*pair) and not any(drifts(run) for run in pair)
            alike += same and len(killed) == len(attacks) == RESTARTS
            ended = "identical" if same else "DIFFERENT or drifted"
            print(f"run {number + 1}, {launcher}: {len(killed)} kills, {ended}; {', '.join(attacks)}", flush=True)
    for (launcher, what), count in found.items():
        print(f"{launcher}: {count} restarts: {what}")
    print(
        f"{alike} of {runs} runs ended by themselves with an identical result; from a kill to training again "
        f"{statistics.median(seconds):.1f} s (median of {len(seconds)}, longest {max(seconds):.1f} s)"
    )
    return 0 if alike == runs and {what for _, what in found} == {HELD} else 1


if __name__ == "__main__":
    sys.exit(be_a_rank(sys.argv[2:]) if sys.argv[1:2] == ["--be-a-rank"] else main())
