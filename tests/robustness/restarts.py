"""Kill a rank in each of three generations under `accelerate launch --max_restarts 3`, ten times over.

    OMP_NUM_THREADS=1 python tests/robustness/restarts.py [--runs 10]

Each run must end by itself, with no replica drifted, and leave what an undisturbed run leaves, byte for byte. Prints
the seconds from each kill to the moment at which training goes on; exits with 1 if a run fails or ends otherwise.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos import CASES, ROOT, differences, drifts

from evorl.runs.launch import run_program
from evorl.runs.run import Run

RESTARTS = 3
SETTINGS = (*CASES["dqn-replicated"], "training.max_steps=2560")


def be_a_rank(arguments: Sequence[str]) -> int:
    """Train as demos/online.py does, but die in the generation after the one that this attempt began with."""
    attempt, kills = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(arguments[0])
    begin, record = Run.__enter__, Run.record

    def begun(self: Run) -> Run:
        print(f"training at {time.time()}" if self.ranks.is_main else "", flush=True)
        return begin(self)

    def die(self: Run, *counted: Any) -> None:
        record(self, *counted)
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


def launch(directory: Path, name: str, kills: int) -> str:
    """The output of a launch that was begun once. Raises CalledProcessError where it did not end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file",
        str(ROOT / "configs" / "accelerate" / "accelerate.yaml"), "--main_process_port", str(port),
        "--max_restarts", str(RESTARTS), __file__, "--be-a-rank", str(kills), *SETTINGS, f"run.name={name}",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    seconds: list[float] = []
    alike = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        launch(directory, "alone", 0)
        for number in range(runs):
            output = launch(directory, f"killed-{number}", RESTARTS)
            killed, training = (
                [float(at) for at in re.findall(rf"{what} at ([\d.]+)", output)] for what in ("killed", "training")
            )
            seconds += [after - before for before, after in zip(killed, training[1:], strict=True)]
            pair = [directory / "runs" / name for name in ("alone", f"killed-{number}")]
            same = not differences(*pair) and not any(drifts(run) for run in pair)
            alike += same and len(killed) == RESTARTS
            print(
                f"run {number + 1}: {len(killed)} kills, {'identical' if same else 'DIFFERENT or drifted'}", flush=True
            )
    print(
        f"{alike} of {runs} runs ended by themselves with an identical result; from a kill to training again "
        f"{statistics.median(seconds):.1f} s (median of {len(seconds)}, longest {max(seconds):.1f} s)"
    )
    return 0 if alike == runs else 1


if __name__ == "__main__":
    sys.exit(be_a_rank(sys.argv[2:]) if sys.argv[1:2] == ["--be-a-rank"] else main())
