"""A run that is killed at the moments that a plan says, and what became of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from comparison import differences, drifts
from launches import Handle, Main, Process, fork_launch
from systems import CASES, PLACEMENTS
from timeline import Timeline, Undisturbed

from evorl.runs.storage.checkpoint_files import Checkpoints

LIMIT = 300.0
"""Seconds in which a launch must end, or come to its next event."""
MOST_KILLS = RESTARTS = 3
SIGNALS = ("SIGKILL", "SIGTERM")
VICTIMS = ("rank 0", "rank 1", "all ranks", "launcher")
RESUMED = ("by hand", "restarted")


@dataclass(frozen=True)
class Kill:
    """One kill, or one that came too late, and what became of its run. `phase` and `generation` say when it came."""

    run: str
    case: str
    placement: str
    resumed: str
    victim: str
    moment: float
    generation: int = 0
    phase: str = ""
    seconds_to_end: float = 0.0
    too_late: bool = False
    outcome: str = ""
    signal: str = "SIGKILL"


@dataclass(frozen=True)
class Plan:
    """What chance has decided about a run: where it trains, and for each kill the victim, its moment and the signal."""

    case: str
    placement: str
    restarts: bool
    kills: Sequence[tuple[str, float, str]]

    @classmethod
    def draw(cls, rng: np.random.Generator, cases: Sequence[str], told: float) -> Plan:
        """Draw a plan; a share of the kills is `told`: ranks are asked to end, and save within the generation."""
        case, placement = str(rng.choice(cases)), str(rng.choice(list(PLACEMENTS)))
        several = PLACEMENTS[placement][0] > 1
        restarts = bool(several and rng.random() < 0.5)
        # A launcher that was killed starts nothing again.
        victims = VICTIMS[: 1 if not several else 3 if restarts else 4]
        count = int(rng.integers(1, MOST_KILLS + 1))
        kills = [(str(rng.choice(victims)), float(rng.random())) for _ in range(count)]
        # A launcher that is asked to end asks its ranks, and the stand-in for it cannot.
        signals = [SIGNALS[int(rng.random() < told and victim != "launcher")] for victim, _ in kills]
        both = [(victim, share, signal) for (victim, share), signal in zip(kills, signals, strict=True)]
        return cls(case, placement, restarts, both)

    @property
    def ranks(self) -> int:
        return PLACEMENTS[self.placement][0]


class Trial:
    """A run, and whatever process trains it at the moment."""

    def __init__(self, main: Main, directory: Path, name: str, plan: Plan) -> None:
        self.plan = plan
        self.run = directory / "runs" / name
        self.log = directory / f"{name}.log"
        self.timeline = Timeline(directory / f"{name}.timeline", fresh=True)
        self._main = main
        self._directory = directory
        self._gone: set[int] = set()
        self._process = self._start()

    def _start(self) -> Process:
        plan, resume = self.plan, "never" if self.plan.restarts else "auto"
        more = (*PLACEMENTS[plan.placement][1], f"run.name={self.run.name}", f"run.resume={resume}")
        settings, restarts = (*CASES[plan.case], *more), RESTARTS * plan.restarts
        return fork_launch(self._main, self._directory, self.log, self.timeline, settings, plan.ranks, restarts)

    @property
    def complete(self) -> int:
        """Return the last generation that has a checkpoint."""
        return max(Checkpoints(self.run / "checkpoints").generations(), default=0)

    def until(self, holds: Callable[[], bool]) -> bool:
        """Wait until something holds; return whether it does before the launch ends. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT
        while not holds():
            if self._process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"still going on after {LIMIT:g} s")
            time.sleep(0.001)
        return True

    def wait(self) -> int:
        """Wait for the launch to end and return its code. Raises TimeoutError."""
        self.until(lambda: False)
        code = self._process.poll()
        assert code is not None
        return code

    def kill(self, victim: str, share: float, signal: str, alone: Undisturbed) -> Kill:
        """Kill at a moment of what is left of the run, and see that it is resumed. Raises TimeoutError."""
        plan, complete = self.plan, self.complete
        event, delay = alone.moment(complete, share)

        def reached() -> bool:
            pids = self.timeline.pids(plan.ranks)
            return len(pids) == plan.ranks and not self._gone & set(pids) and self.timeline.count(0) > event

        how = RESUMED[plan.restarts]
        kill = Kill(self.run.name, plan.case, plan.placement, how, victim, share, too_late=True, signal=signal)
        if not self.until(reached):
            return kill
        time.sleep(delay)
        return self._hit(kill)

    def _hit(self, kill: Kill) -> Kill:
        """Kill the victim, if it still lives, and wait until all are gone that end with it. Raises TimeoutError."""
        ranks = self.timeline.pids(self.plan.ranks)
        try:
            handles = [Handle(pid) for pid in ranks]
        except ProcessLookupError:
            return kill
        launcher = Handle(self._process.pid)
        targets = {"all ranks": handles, "launcher": [launcher], "rank 0": handles[:1], "rank 1": handles[1:]}
        killed, everyone = targets[kill.victim], handles if self.plan.restarts else [*handles, launcher]
        phase = self.timeline.phase(1 if kill.victim == "rank 1" else 0)
        if any(target.ended() for target in killed):
            return kill
        for target in killed:
            target.kill(kill.signal)
        began = time.monotonic()
        generation = self.complete + 1
        if not all(handle.ended(LIMIT) for handle in everyone):
            raise TimeoutError(f"a process lives on {LIMIT:g} s after a kill")
        seconds = time.monotonic() - began
        for handle in [*handles, launcher]:
            handle.close()
        self._gone |= set(ranks)
        if not self.plan.restarts:
            self.wait()
            self._process = self._start()
        return replace(kill, generation=generation, phase=phase, seconds_to_end=seconds, too_late=False)

    def abandon(self) -> None:
        """Kill whatever still runs."""
        for pid in [self._process.pid, *self.timeline.pids(self.plan.ranks)]:
            try:
                handle = Handle(pid)
            except ProcessLookupError:
                continue
            handle.kill()
            handle.close()


def train_alone(main: Main, directory: Path, case: str, placement: str) -> tuple[Path, Undisturbed]:
    """Train a run that is left alone, unless that was done before; return its directory and its course."""
    name = f"{case}-{placement.replace(' ', '-')}"
    course = directory / f"{name}.json"
    if not course.is_file():
        trial = Trial(main, directory, name, Plan(case, placement, False, ()))
        code, ended = trial.wait(), time.monotonic()
        wrong = problems(trial, code, trial.run)
        if wrong:
            raise SystemExit(f"{name}: undisturbed, {wrong}; see {trial.log}")
        course.write_text(json.dumps(asdict(Undisturbed.of(trial.timeline, ended))))
        trial.timeline.path.unlink()
    return directory / "runs" / name, Undisturbed(**json.loads(course.read_text()))


def problems(trial: Trial, code: int, alone: Path) -> str:
    """Say what is wrong with how a run ended, "" if nothing is."""
    if code:
        return f"it ends with {code}"
    log, names = trial.log.read_text(errors="replace"), differences(trial.run, alone)
    summary = trial.run / "summary.json"
    ended = json.loads(summary.read_bytes())["ended"] if summary.is_file() else "nothing"
    drifted = drifts(trial.run)
    wrong = {
        f"it leaves otherwise: {', '.join(names)}": bool(names),
        f"replicas drifted in {drifted} generations": drifted > 0,
        f"its summary says that it ended by {ended}": ended != "finished",
        "it says that it is not bit-exact": "not bit-exact" in log,
        "it prints a traceback": "Traceback" in log,
    }
    return "; ".join(what for what, holds in wrong.items() if holds)


def disturb(main: Main, directory: Path, name: str, plan: Plan) -> list[Kill]:
    """Train a run with its kills on the way, and tell of each what became of the run."""
    alone, course = train_alone(main, directory, plan.case, plan.placement)
    trial = Trial(main, directory, name, plan)
    kills: list[Kill] = []
    try:
        for victim, share, signal in plan.kills:
            kills.append(trial.kill(victim, share, signal, course))
            if kills[-1].too_late:
                break
        outcome = problems(trial, trial.wait(), alone) or "identical"
    except TimeoutError as error:
        outcome = str(error)
        trial.abandon()
    trial.timeline.path.unlink()
    if outcome == "identical":
        shutil.rmtree(trial.run)
        trial.log.unlink()
    return [replace(kill, outcome=outcome) for kill in kills]
