"""Kill and stop the actors of running systems, and end their learners, and see what becomes of it.

    OMP_NUM_THREADS=1 python tests/robustness/actor_faults.py --kills 20 --stops 5 --seed 1 [SYSTEM ...]

For each system one run whose actors are killed and stopped at random moments, which must train two generations more and
then end in order, and three whose learner is ended by SIGKILL, SIGTERM and SIGINT. Nothing may be left of any: no
process, and no shared memory. Prints a JSON line for each run, and exits with 1 where one ended otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).parent.parent.parent
LIMIT = 300.0
"""Seconds in which a run must end."""
GONE = 10.0
"""Seconds in which nothing may be left of it."""
COMMON = (
    "environment={id: CartPole-v1, num_envs: 2, vectorization: sync}", "network={hidden_sizes: [16, 16]}",
    "actors={count: 2, timeout: 3.0, max_restarts: 20}", "evaluation={episodes: 2, max_steps: 20}", "population.size=2",
    "evaluation.confirmation_episodes=0", "tracking.backends=[]", "training.target_fitness=null",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}}", "run.threads=1", "run.name=a",
)  # fmt: skip
REPLAYED = ("replay={capacity: 2000, learning_starts: 100, prioritised: {}}",)
SYSTEMS = {
    "a3c": ("algorithm={name: a3c, rollout_steps: 8}",),
    "a3c_data_parallel": ("algorithm={name: a3c_data_parallel, rollout_steps: 4, rollouts: 2}",),
    "a3c_shared": ("algorithm={name: a3c_shared, rollout_steps: 8}",),
    "apex_ddpg": (
        *REPLAYED, "algorithm={name: apex_ddpg, rollout_steps: 8, batch_size: 8, learn_step: 8}",
        "environment.id=Pendulum-v1",
    ),
    "apex_dqn": (*REPLAYED, "algorithm={name: apex_dqn, rollout_steps: 8, batch_size: 8, learn_step: 8}"),
    "appo": ("algorithm={name: appo, rollout_steps: 8}",),
    "impala": ("algorithm={name: impala, rollout_steps: 8}",),
}  # fmt: skip
ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
"""The exit code of a learner that got this signal."""


@dataclass
class Result:
    """What was done to a run, and what became of it."""

    system: str
    what: str
    kills: int = 0
    stops: int = 0
    restarts: int = 0
    generations: int = 0
    code: int | None = None
    processes_left: int = 0
    shared_memory_left: int = 0
    seconds: float = 0.0
    said: str = ""
    """The last line that was printed."""
    fine: bool = False


class Running:
    """A run of a system, in a directory of its own."""

    def __init__(self, system: str, directory: Path, steps: int) -> None:
        """Start it, with generations of so many steps."""
        config = directory / "config.yaml"
        config.write_text("{}")
        self.directory, self._began = directory, time.monotonic()
        self._shared = _shared_memory()
        self._seen: set[psutil.Process] = set()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "demos" / "asynchronous.py"), "--config", str(config)]
        settings = [f"evolution.steps={steps}", "training.max_steps=1000000", *COMMON, *SYSTEMS[system]]
        with (directory / "log").open("wb") as log:
            self.learner = subprocess.Popen(
                [*command, *settings], cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def actors(self) -> list[psutil.Process]:
        """Return the actors that live and are not stopped, and note all processes of the run."""
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self.learner.pid).children(recursive=True)
            self._seen.update(family)
            servers = {each.pid for each in family if each.ppid() == self.learner.pid}
            gone = psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED
            return [each for each in family if each.ppid() in servers and each.status() not in gone]
        return []

    def wait_for_actors(self) -> list[psutil.Process]:
        """Return the actors as soon as there are some; none where the run has ended."""
        deadline = time.monotonic() + LIMIT
        while self.learner.poll() is None and time.monotonic() < deadline:
            if actors := self.actors():
                return actors
            time.sleep(0.02)
        return []

    def generations(self) -> list[dict[str, object]]:
        """Return the lines of the run's metrics."""
        path = self.directory / "runs" / "a" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def end(self, result: Result) -> Result:
        """Wait for the end, and note what is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            result.code = self.learner.wait(LIMIT)
        deadline = time.monotonic() + GONE
        while time.monotonic() < deadline and any(each.is_running() for each in self._seen):
            time.sleep(0.05)
        left = [each for each in self._seen if each.is_running()]
        result.processes_left = len(left)
        result.shared_memory_left = len(_shared_memory() - self._shared)
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        lines = (self.directory / "log").read_text(errors="replace").replace("\r", "\n").split("\n")
        result.said = next((line for line in reversed(lines) if line.strip()), "")[:200]
        rows = self.generations()
        result.generations, result.seconds = len(rows), round(time.monotonic() - self._began, 1)
        for row in rows:
            figures = row["actors"]
            assert isinstance(figures, dict)
            result.restarts += int(figures["restarts"])
        return result


def _shared_memory() -> set[Path]:
    """Return what has a name among the segments of shared memory and is ours."""
    place = Path("/dev/shm")
    return set(place.glob("*evorl*")) if place.is_dir() else set()


def disturb_actors(
    system: str, directory: Path, rng: np.random.Generator, kills: int, stops: int, steps: int = 2000
) -> Result:
    """Kill and stop actors of a run at random moments; it must go on and end."""
    running, result = Running(system, directory, steps), Result(system, "actors")
    running.wait_for_actors()
    struck: set[psutil.Process] = set()
    for stop in rng.permutation([False] * kills + [True] * stops):
        time.sleep(float(rng.uniform(0.05, 0.5)))
        # Those that were stopped are replaced in some seconds; on a busy machine a killed one may take a while to end.
        while not (actors := [each for each in running.wait_for_actors() if each not in struck]):
            if running.learner.poll() is not None:
                break
            time.sleep(0.1)
        if not actors:
            break
        victim = actors[int(rng.integers(len(actors)))]
        struck.add(victim)
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
            result.stops += bool(stop)
            result.kills += not stop
    before = len(running.generations())
    deadline = time.monotonic() + LIMIT
    while len(running.generations()) < before + 2 and time.monotonic() < deadline and running.learner.poll() is None:
        running.actors()
        time.sleep(0.1)
    went_on = running.learner.poll() is None and len(running.generations()) >= before + 2
    running.learner.send_signal(signal.SIGTERM)
    result = running.end(result)
    clean = not result.processes_left and not result.shared_memory_left
    result.fine = went_on and result.code == 143 and clean and result.kills == kills and result.stops == stops
    return result


def end_learner(system: str, directory: Path, rng: np.random.Generator, number: signal.Signals) -> Result:
    """End the learner of a run by a signal."""
    running, result = Running(system, directory, 2000), Result(system, number.name)
    running.wait_for_actors()
    time.sleep(float(rng.uniform(0.2, 2.0)))
    running.actors()
    running.learner.send_signal(number)
    result = running.end(result)
    result.fine = result.code == ENDS[number] and not result.processes_left and not result.shared_memory_left
    return result


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", default=list(SYSTEMS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args(arguments)
    # A shell lets what it starts in the background ignore Ctrl-C, and runs would do so, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fine, rng = True, np.random.default_rng(parsed.seed)
    for system in parsed.systems:
        with tempfile.TemporaryDirectory() as place:
            for result in _cases(system, Path(place), rng, parsed.kills, parsed.stops):
                print(json.dumps(asdict(result)), flush=True)
                fine = fine and result.fine
    return 0 if fine else 1


def _cases(system: str, place: Path, rng: np.random.Generator, kills: int, stops: int) -> Iterator[Result]:
    yield disturb_actors(system, _fresh(place, "actors"), rng, kills, stops)
    for number in ENDS:
        yield end_learner(system, _fresh(place, number.name), rng, number)


def _fresh(place: Path, name: str) -> Path:
    directory = place / name
    directory.mkdir()
    return directory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
