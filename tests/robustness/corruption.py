"""Damage the newest checkpoint of a run in every way a disk, a crash or a hand can, and see that none goes unnoticed.

    OMP_NUM_THREADS=1 python tests/robustness/corruption.py [--rounds 16] [--resumes 25] [--seed 1]

A small run is trained for some generations. Its newest checkpoint is then damaged, one way at a time: `verify` must
name the damaged file, the manifest where that is what was damaged. Some of the damaged runs are resumed: they must say
which file is damaged, go on from the checkpoint before it, and end as a run that was left alone, byte for byte. With
every checkpoint damaged they must end with code 2 and leave the metrics alone. Exits with 1 if anything went unnoticed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evorl.runs.directory import Checkpoints
from evorl.runs.program import run_program
from evorl.types import UserError

ROOT = Path(__file__).parent.parent.parent
MANIFEST = "manifest.json"
WHOLE = "whole directory"
KEEP = 4
FIRST, LATER = "training.max_steps=300", "training.max_steps=420"
SETTINGS = (
    "checkpoint.keep=4", "evaluation.max_steps=500", "replay.capacity=5000", "seed=3",
    "evolution.mutation={none: 0.1, architecture: 1, parameters: 0.5, activation: 0.5, hyperparameters: 0.5,"
    " new_layer: 0.5}",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}}",
)  # fmt: skip


class Damage(NamedTuple):
    """What takes the place of one file of a checkpoint: bytes, a symbolic link, something else, or nothing.

    With `file` as the whole directory it is another generation's, at `link`.
    """

    kind: str
    file: str
    payload: bytes | None = None
    link: Path | None = None

    def do(self, checkpoint: Path) -> None:
        path = checkpoint / self.file
        if self.file == WHOLE and self.link is not None:
            shutil.rmtree(checkpoint)
            shutil.copytree(self.link, checkpoint)
            return
        path.unlink()
        if self.link is not None:
            path.symlink_to(self.link)
        elif self.kind == "a pipe":
            os.mkfifo(path)
        elif self.kind == "a directory":
            path.mkdir()
        elif self.payload is not None:
            path.write_bytes(self.payload)

    def named(self, checkpoint: Path) -> str:
        """How a message about it begins."""
        return f"{checkpoint / (MANIFEST if self.file == WHOLE else self.file)}: "


def train(*overrides: str) -> tuple[int, str, list[str]]:
    """The exit code of a run of demos/online.py in this process, what it printed as errors, and its warnings."""
    spec = importlib.util.spec_from_file_location("online", ROOT / "demos" / "online.py")
    assert spec is not None
    assert spec.loader is not None
    online = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(online)
    arguments = ["--config", str(ROOT / "tests" / "helpers" / "small.yaml"), *SETTINGS, *overrides]
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()) as errors:
        warnings.simplefilter("always")
        code = run_program(online.main, arguments)
    return code, errors.getvalue(), [str(warning.message) for warning in caught]


def read(checkpoint: Path) -> dict[str, bytes]:
    """The files of a checkpoint."""
    return {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}


def damages(
    checkpoint: Path, others: Sequence[Path], rng: np.random.Generator, rounds: int, names: Sequence[str] = ()
) -> Iterator[Damage]:
    """All kinds of damage to each file (or to those of these `names`); those that chance decides, `rounds` times."""
    files = read(checkpoint)
    for name in names or files:
        yield from to_one(name, files, [read(other) for other in others], checkpoint, rng, rounds)
    if not names:
        for other in others:
            yield Damage("another generation's", WHOLE, link=other)


def to_one(
    name: str,
    files: Mapping[str, bytes],
    others: Sequence[Mapping[str, bytes]],
    checkpoint: Path,
    rng: np.random.Generator,
    rounds: int,
) -> Iterator[Damage]:
    """All kinds of damage to one file."""
    payload = files[name]
    for _ in range(rounds):
        yield Damage("cut short", name, payload[: int(rng.integers(1, len(payload)))])
        flipped = bytearray(payload)
        flipped[int(rng.integers(len(payload)))] ^= 1 << int(rng.integers(8))
        yield Damage("a bit flipped", name, bytes(flipped))
    for count in (1, int(rng.integers(2, 5000))):
        yield Damage("bytes appended", name, payload + rng.bytes(count))
    yield Damage("emptied", name, b"")
    yield Damage("zeros of its size", name, bytes(len(payload)))
    # An elite that has not been beaten since is the same file in several generations, and no damage.
    for older in dict.fromkeys(other[name] for other in others if other[name] != payload):
        yield Damage("another generation's", name, older)
    for kind in sorted(files.keys() - {name}):
        yield Damage("of another kind", name, files[kind])
    yield Damage("removed", name)
    # A link to an equal file is damage too: what it leads to can change later, or be anybody's.
    for target in (checkpoint.parent.parent / "elsewhere" / name, Path("/nowhere")):
        yield Damage("a symbolic link", name, link=target)
    yield Damage("a pipe", name)
    yield Damage("a directory", name)


def complaint(checkpoint: Path, damage: Damage) -> str:
    """What `verify` says of a checkpoint that is damaged so; "" if nothing. The checkpoint is whole again then."""
    spare = checkpoint.with_name("spare")
    shutil.copytree(checkpoint, spare)
    damage.do(checkpoint)
    try:
        Checkpoints(checkpoint.parent, KEEP).verify(int(checkpoint.name.partition("-")[2]))
    except UserError as error:
        return str(error)
    finally:
        shutil.rmtree(checkpoint)
        spare.rename(checkpoint)
    return ""


def prepare(run: Path) -> tuple[Path, list[Path]]:
    """Train `run`; its newest checkpoint, of which a copy lies elsewhere in the run, and the older ones."""
    code, errors, _ = train(f"run.name={run.name}", FIRST)
    assert code == 0, errors
    *others, newest = sorted((run / "checkpoints").iterdir())
    shutil.copytree(newest, run / "elsewhere")
    return newest, others


def resume(run: Path, original: Path, whole: Path, damage: Sequence[tuple[Path, Damage]]) -> str:
    """Resume a copy of a run with damaged checkpoints; what is wrong with how that goes, "" if nothing is."""
    shutil.copytree(original, run)
    places = [run / "checkpoints" / checkpoint.name for checkpoint, _ in damage]
    for place, (_, one) in zip(places, damage, strict=True):
        one.do(place)
    hopeless = len(damage) == len(list((run / "checkpoints").iterdir()))
    before = (run / "metrics.jsonl").read_bytes()
    code, errors, warned = train(f"run.name={run.name}", LATER, "run.resume=auto")
    for place, (_, one) in zip(places, damage, strict=True):
        named = one.named(place)
        if not any(message.startswith(named) and "the checkpoint before it" in message for message in warned):
            return f"it does not warn of {named}but says {warned}"
    if hopeless:
        untouched = (run / "metrics.jsonl").read_bytes() == before
        return "" if code == 2 and errors.count("error: ") == 1 and untouched else f"it ends with {code}: {errors}"
    if code:
        return f"it ends with {code}: {errors}"
    ends = [read(max((path / "checkpoints").glob("generation-*"))) for path in (run, whole)]
    kept = [{name: end[name] for name in end if name.endswith(".safetensors")} for end in ends]
    return "" if kept[0] == kept[1] else "it does not end as the run that was left alone"


def verify_all(newest: Path, plan: Sequence[Damage]) -> list[str]:
    """Every damage in turn; prints the table and gives what went unnoticed."""
    found, all_of, wrong = Counter[tuple[str, str]](), Counter[tuple[str, str]](), []
    for damage in plan:
        message = complaint(newest, damage)
        noticed = message.startswith(damage.named(newest))
        all_of[damage.kind, damage.file] += 1
        found[damage.kind, damage.file] += noticed
        if not noticed:
            wrong.append(f"{damage.file}, {damage.kind}: {message or 'no error'}")
    files = list(dict.fromkeys(damage.file for damage in plan))
    print("| noticed | " + " | ".join(files) + " |\n" + "|---" * (len(files) + 1) + "|")
    for kind in dict.fromkeys(damage.kind for damage in plan):
        cells = (f"{found[kind, file]} of {all_of[kind, file]}" if all_of[kind, file] else "" for file in files)
        print(f"| {kind} | " + " | ".join(cells) + " |")
    return wrong


def resume_some(
    original: Path, newest: Path, others: Sequence[Path], plan: Sequence[Damage], rng: np.random.Generator, count: int
) -> list[str]:
    """Resume so many damaged runs, every fifth with all its checkpoints damaged; gives what went wrong."""
    whole = original.with_name("whole")
    code, errors, _ = train("run.name=whole", LATER)
    assert code == 0, errors
    wrong = []
    for number in range(count):
        damage = [(newest, plan[int(rng.integers(len(plan)))])]
        if number % 5 == 1:
            for other in others:
                own = list(damages(other, [newest], rng, 1, ["agents.safetensors", "state.json", MANIFEST]))
                damage.append((other, own[int(rng.integers(len(own)))]))
        if problem := resume(original.with_name(f"resumed-{number}"), original, whole, damage):
            wrong.append(f"resumed with {damage[0][1].file}, {damage[0][1].kind}: {problem}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--resumes", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    rng = np.random.default_rng(parsed.seed)
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        original = Path(directory) / "runs" / "original"
        newest, others = prepare(original)
        plan = list(damages(newest, others, rng, parsed.rounds))
        wrong = verify_all(newest, plan)
        wrong += resume_some(original, newest, others, plan, rng, parsed.resumes)
    print(f"\n{len(plan)} damages; {parsed.resumes} resumed; " + ("WRONG:" if wrong else "none went unnoticed"))
    print("\n".join(wrong))
    return 1 if wrong or len(plan) < 200 else 0


if __name__ == "__main__":
    sys.exit(main())
