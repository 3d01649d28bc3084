"""Files of JSON lines that benchmarks write, the scores and the revision that their lines have, and commands run.

Those of finished experiments are compressed (`.jsonl.gz`).
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data"
EVORL = "import sys; from evorl.__main__ import main; sys.exit(main())"
"""The `evorl` command of the package that this Python imports."""
CODE = ("evorl", "demos", "configs", "benchmarks")
"""The folders on which the result of a run may depend."""
Line = Mapping[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is no file."""
    if not path.is_file():
        return []
    payload = path.read_bytes()
    text = (gzip.decompress(payload) if path.suffix == ".gz" else payload).decode()
    return [json.loads(line) for line in text.splitlines()]


def append(path: Path, *lines: Line) -> None:
    """Append JSON lines in a single write, so that only a disk failure can leave a partial line."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, _encoded(path, lines))
        os.fsync(file)
    finally:
        os.close(file)


def replace_lines(path: Path, new: Sequence[Line], run: Callable[[Line], Hashable]) -> list[Line]:
    """Add lines to a file in place of those of the same runs, and return all; `run` identifies the run of a line."""
    again = {run(line) for line in new}
    lines: list[Line] = [line for line in read_lines(path) if run(line) not in again]
    lines += new
    path.write_bytes(_encoded(path, lines))
    return lines


def _encoded(path: Path, lines: Sequence[Line]) -> bytes:
    """Lines as a file has them; compressed ones can follow others, since gzip's members do."""
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return gzip.compress(text, mtime=0) if path.suffix == ".gz" else text


@contextmanager
def claimed(job: Sequence[object], directory: Path) -> Iterator[bool]:
    """Claim a run until the block ends; False if another process on this machine has it."""
    with (directory / ("-".join(map(str, job)) + ".lock")).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def evaluated(run: Path, episodes: int) -> dict[str, float]:
    """Return mean, standard deviation, minimum and maximum of the best agent's returns over fresh episodes."""
    command = [sys.executable, "-c", EVORL, "evaluate", str(run), "--episodes", str(episodes), "--json"]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {key: round(float(said[key]), 2) for key in ("mean", "std", "min", "max")}


def run(command: Sequence[str], limit: float) -> tuple[int, str]:
    """Run a command, killing its process group after `limit` seconds; return the exit code (then 124) and output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            code = 124
        output.seek(0)
        return code, output.read()


def revision() -> str:
    """The revision of the code, with `-dirty` if code or configurations differ from it.

    To be called before a run begins: the tree may have another revision when it ends.
    """
    changed = _git("status", "--porcelain", "--", *CODE, ":!benchmarks/data")
    return _git("describe", "--always") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
