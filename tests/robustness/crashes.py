"""Stop a run at every call by which it changes its directory, in every way a kill or a power failure can, and resume.

    OMP_NUM_THREADS=1 python tests/robustness/crashes.py [--generations 2] [--every 1]

A small run is trained in this process with all its file-system calls on record: from its beginning; resumed after it
was killed just before its last checkpoint; and resumed with its newest checkpoint damaged. After each call the disk is
laid out anew as a kill would leave it (all calls have happened, or half of a write), and as power failures would: names
that no fsync of their directory has made last are there or not, in all the ways of lossy_disk.py, and bytes that were
not synced are kept, torn, zeros or lost. The power also fails after runs that were killed at each call and resumed to
their end, which must by then have synced what the killed one could not.

Each disk that differs from the others is resumed with `run.resume=auto`. That must end with code 0, leave what a run
that was left alone leaves, byte for byte, and live no generation again whose checkpoint was complete before the
failure. Prints what was found; exits with 1 if anything ended otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from call_log import CallLog, lay_out
from chaos import differences
from corruption import train
from lossy_disk import UNSYNCED, Call, Entries, Tree, World, Write, torn

STEPS = 40
"""The steps of a generation. All of them count, since environments are reset in the step that ends an episode."""
SETTINGS = (
    "checkpoint.keep=2", "evaluation.max_steps=20", "replay.capacity=500", "algorithm.learn_step=8",
    f"evolution.steps={STEPS}", "environment.vectorization=sync",
)  # fmt: skip
NAME = "run"
KILLS = ("killed", "killed in a write")
TWICE = "killed, resumed to its end"
LOSSES = (*KILLS, *(f"power fails, unsynced bytes {kind}" for kind in UNSYNCED))


@dataclass(frozen=True)
class Session:
    """One process of a run: the disk it found, its calls, and with which generations it was to end.

    `completed` says from which call on a generation's checkpoint was complete, and `lines` are the metrics' in the end.
    """

    phase: str
    generations: int
    before: World
    calls: Sequence[Call]
    completed: Sequence[tuple[int, int]]
    lines: Sequence[bytes]
    alone: Path

    def safe(self, count: int) -> int:
        """Give the last generation that may not be re-run after so many calls."""
        return max((generation for generation, since in self.completed if since <= count), default=0)


class Failure(NamedTuple):
    """What has happened to a run, and the last generation that it may not live again."""

    phase: str
    loss: str
    call: str
    safe: int


class End(NamedTuple):
    """How a resumed run ended: what was wrong with that, and how many generations it did not live again."""

    problem: str
    kept: int


def no_waiting() -> AbstractContextManager[object]:
    """Let fsync return at once, as no power fails here; the log has it all the same."""
    return patch.object(os, "fsync", lambda file: None)


def play(directory: Path, generations: int, *overrides: str) -> str:
    """Train or resume `runs/run` below a directory; what is wrong with how that ended, "" if nothing is."""
    settings = (*SETTINGS, f"run.name={NAME}", f"training.max_steps={STEPS * generations}", *overrides)
    with contextlib.chdir(directory):
        try:
            code, errors, _ = train(*settings)
        except Exception as error:
            return f"it ends with a traceback: {error!r}"
    return f"it ends with {code}: {' '.join(errors.split()[-60:])}" if code else ""


def record(
    directory: Path, phase: str, generations: int, before: World, safe: int, alone: Path, *overrides: str
) -> Session:
    """Play a session in a directory that is made for it."""
    lay_out(before.now.tree(), directory)
    log = CallLog(directory, before.after(()))
    with no_waiting(), log.recording():
        problem = play(directory, generations, *overrides)
        assert not problem, f"{phase}: undisturbed, {problem}"
    assert not different(directory / "runs" / NAME, alone), f"{phase}: undisturbed, it ends otherwise than alone"
    lines = (directory / "runs" / NAME / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return Session(phase, generations, before, log.calls, [(safe, 0), *log.completed], lines, alone)


def sessions(directory: Path, generations: int) -> list[Session]:
    """Play all sessions that are to be disturbed; the later ones begin where the first was stopped."""
    alone = [directory / f"alone-{count}" for count in (generations, generations + 1)]
    for count, place in enumerate(alone, generations):
        place.mkdir()
        with no_waiting():
            assert not play(place, count)
    ends = [place / "runs" / NAME for place in alone]
    first = record(directory / "first", "training", generations, World(), 0, ends[0])
    newest = f"generation-{generations:06d}"
    last = max(n for n, call in enumerate(first.calls) if isinstance(call, Entries) and call.names.get(newest))
    killed = first.before.after(first.calls[:last])
    damaged = dict(first.before.after(first.calls).now.tree())
    state = f"runs/{NAME}/checkpoints/{newest}/state.json"
    damaged[state] = (damaged[state] or b"")[:100]
    return [
        first,
        *(
            record(directory / phase, phase, generations + 1, world, generations - 1, ends[1], "run.resume=auto")
            for phase, world in (("resumed after a kill", killed), ("resumed past damage", World.of(damaged)))
        ),
    ]


def failures(session: Session) -> Iterator[tuple[Failure, Tree]]:
    """Give every failure of a session and the tree that it would leave."""
    world = session.before.after(())
    call = "nothing yet"
    for count in range(len(session.calls) + 1):
        safe = session.safe(count)
        yield Failure(session.phase, KILLS[0], call, safe), world.now.tree()
        for kind, tree in world.after_failures():
            yield Failure(session.phase, LOSSES[len(KILLS) + list(UNSYNCED).index(kind)], call, safe), tree
        if count < len(session.calls):
            following = session.calls[count]
            call = following.label
            if isinstance(following, Write):
                disk = world.now.copy()
                disk.apply(torn(following))
                yield Failure(session.phase, KILLS[1], call, safe), disk.tree()
            world.apply(following)


def different(run: Path, alone: Path) -> list[str]:
    """Name what a run has left otherwise than one that was left alone; of its checkpoints the newest stays."""
    newest = max((alone / "checkpoints").glob("generation-*"))
    for path in (run / "checkpoints").glob("*"):
        if path.name != newest.name:
            shutil.rmtree(path)  # What is older, was never completed or was set aside may be anything.
    older = [path for path in (alone / "checkpoints").iterdir() if path != newest]
    names = [name for name in differences(run, alone) if (alone / name).parent not in older]
    summary = run / "summary.json"
    ended = json.loads(summary.read_bytes())["ended"] if summary.is_file() else ""
    return names if ended == "finished" else [*names, "summary.json"]


def resume(session: Session, tree: Tree, directory: Path) -> End:
    """Lay out a tree in a new directory and go on with the run in it."""
    lay_out(tree, directory)
    with no_waiting():
        problem = play(directory, session.generations, "run.resume=auto")
    if problem:
        return End(problem, 0)
    run = directory / "runs" / NAME
    if names := different(run, session.alone):
        problem = f"it leaves otherwise: {', '.join(names)}"
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else []
    # What a clock measured tells a line that was kept from one of a generation that was re-run.
    alike = [line == other for line, other in zip(lines, session.lines, strict=False)]
    return End(problem, [*alike, False].index(False))


def verdict(failure: Failure, end: End) -> str:
    """Say what is wrong with how a run ended after a failure, "" if nothing is."""
    if not end.problem and end.kept < failure.safe:
        return f"it lives generation {end.kept + 1} again, although generation {failure.safe} had its checkpoint"
    return end.problem


def disturb(session: Session, directory: Path, every: int = 1) -> list[tuple[Failure, int, str]]:
    """Resume each `every`th distinct tree; gives for every failure that left one its number and what was wrong."""
    found: dict[frozenset[tuple[str, bytes | None]], list[Failure]] = {}
    trees: list[Tree] = []
    for failure, tree in failures(session):
        key = frozenset(tree.items())
        if key not in found:
            trees.append(tree)
        found.setdefault(key, []).append(failure)
    done = []
    for number, (tree, left) in enumerate(zip(trees, found.values(), strict=True)):
        if number % every == 0:
            with tempfile.TemporaryDirectory(dir=directory) as name:
                end = resume(session, tree, Path(name) / "resumed")
            done += [(failure, number, verdict(failure, end)) for failure in left]
    return done


def fail_twice(session: Session, directory: Path, every: int = 1) -> list[tuple[Failure, int, str]]:
    """Kill a session after each `every`th call, resume it to its end, and let the power fail then, as `disturb` does.

    What the killed process had no time to sync is then for the next one to sync. All that may be lost is lost.
    """
    done = []
    for count in range(0, len(session.calls) + 1, every):
        killed = session.before.after(session.calls[:count])
        with tempfile.TemporaryDirectory(dir=directory) as name:
            place, to = Path(name), session.generations
            again = record(place / "again", TWICE, to, killed, 0, session.alone, "run.resume=auto")
            end = resume(again, killed.after(again.calls).durable.tree(), place / "resumed")
        label = session.calls[count - 1].label if count else "nothing yet"
        # The process has reported that it is finished.
        failure = Failure(TWICE, LOSSES[-1], label, to)
        done.append((failure, count, verdict(failure, end)))
    return done


def waiting(session: Session) -> list[str]:
    """Name the calls that made something which a power failure could take although a checkpoint was complete."""
    told = []
    for generation, count in session.completed[1:]:
        pending = session.before.after(session.calls[:count]).pending
        labels = [call.label for call in pending if not isinstance(call, Entries) or any(call.names.values())]
        told += [f"generation {generation} complete, not synced: {label}" for label in dict.fromkeys(labels)]
    return told


def table(phases: Sequence[str], done: Sequence[tuple[Failure, int, str]]) -> str:
    """Tell how many failures there were and how many runs ended as the one that was left alone."""
    rows = ["| session | failure | failures | distinct disks | identical ends |", "|---|---|---|---|---|"]
    for phase in phases:
        for loss in LOSSES:
            here = [(number, problem) for failure, number, problem in done if failure[:2] == (phase, loss)]
            well = sum(not problem for _, problem in here)
            if here:
                rows.append(f"| {phase} | {loss} | {len(here)} | {len({number for number, _ in here})} | {well} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=2, help="at least 2 (default: 2)")
    parser.add_argument("--every", type=int, default=1, help="resume only each so-manyth disk (default: 1)")
    parsed = parser.parse_args()
    if parsed.generations < 2 or parsed.every < 1:
        parser.error("--generations must be at least 2, --every at least 1")
    started = time.monotonic()
    done: list[tuple[Failure, int, str]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        played = sessions(directory, parsed.generations)
        for session in played:
            done += disturb(session, directory, parsed.every)
        done += fail_twice(played[0], directory, parsed.every)
    print(table([*(session.phase for session in played), TWICE], done))
    for session in played:
        print(f"\n{session.phase}: {len(session.calls)} calls", *waiting(session), sep="\n- ")
    wrong = Counter((failure.phase, problem) for failure, _, problem in done if problem)
    for (phase, problem), count in wrong.items():
        first = next(failure for failure, _, found in done if failure.phase == phase and found == problem)
        print(f"\n{phase}: {count} times {problem}\n- first after `{first.call}`: {first.loss}")
    distinct = len({(failure.phase, number) for failure, number, _ in done})
    how = f"{sum(wrong.values())} ended otherwise" if wrong else "all ended as if nothing had happened"
    print(f"\n{len(done)} failures, {distinct} distinct disks, {time.monotonic() - started:.0f} s; {how}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
