"""Kill runs at random moments, resume them, and compare what is left with runs that were left alone, byte for byte.

    OMP_NUM_THREADS=1 python tests/robustness/chaos.py [--kills 56] [--seed 1] [--case NAME ...]

Each case is trained by two ranks twice: undisturbed, and with kills (SIGKILL of one rank, of all ranks, or of the
launcher) that are timed to fall into every phase of a generation. Agents, replay, metrics and lineage must then be
equal and replicas not have drifted; only what a clock measured is left out. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from evorl.runs.program import run_program
from evorl.system.stopwatch import Stopwatch

ROOT = Path(__file__).parent.parent.parent
PHASES = ("collection", "learning", "evaluation", "evolution", "checkpoint")
PHASE_OF = {
    "acting": 0,
    "environments": 0,
    "sampling": 0,
    "learning": 1,
    "evaluation": 2,
    "evolution": 3,
    "checkpoint": 4,
}
VICTIMS = ("rank 0", "rank 1", "all ranks", "launcher")
MEASURED = ("seconds", "wall_clock_seconds", "env_steps_per_second", "updates_per_second")
COMMON = (
    "population.size=4", "evaluation.episodes=2", "tracking.backends=[]", "run.timeout=60",
    "evolution.mutation={none: 0.1, architecture: 1, parameters: 0.5, activation: 0.5, hyperparameters: 0.5,"
    " new_layer: 0.5}",
    "evolution.architecture={min_units: 4, max_units: 96, unit_steps: [3, 16], max_layers: 4}",
)  # fmt: skip
DQN = (
    "environment={id: LunarLander-v3, num_envs: 2, carry_over: false}",
    "algorithm={name: dqn, batch_size: 16, learn_step: 4}",
    "network.hidden_sizes=[16, 16]", "replay={capacity: 2000, learning_starts: 100}", "evolution.steps=320",
    "evaluation.max_steps=80", "training.max_steps=9600",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}, batch_size: {min: 4, max: 32}}",
)  # fmt: skip
PPO = (
    "environment={id: CartPole-v1, num_envs: 2, observation_indices: [0, 2], vectorization: sync, carry_over: false}",
    "network.hidden_sizes=[16]",
    "algorithm={name: ppo, rollout_steps: 32, sequence_length: 8, batch_size: 32, epochs: 2, target_kl: 0.02,"
    " normalize_observations: true, normalize_rewards: true}",
    "network.recurrent=gru", "network.recurrent_size=12", "evolution.steps=256", "evaluation.max_steps=64",
    "training.max_steps=7680", "evolution.hyperparameters={clip: {min: 0.1, max: 0.4}, epochs: {min: 1, max: 4}}",
)  # fmt: skip
CASES = {
    "dqn-replicated": (*COMMON, *DQN),
    "dqn-sharded": (*COMMON, *DQN, "population.placement=sharded"),
    "ppo-recurrent": (*COMMON, *PPO),
}


@dataclass
class Kill:
    """One kill: whom it hit, in which phase, and how long it took until no process was left."""

    victim: str
    phase: str
    seconds_to_end: float


class Launch:
    """Two ranks under `accelerate launch`, whose phases can be seen from outside."""

    def __init__(self, directory: Path, name: str, settings: Sequence[str]) -> None:
        self._marks = directory / f"{name}.phases"
        self._marks.write_bytes(b"\xff" * mmap.PAGESIZE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file",
            str(ROOT / "configs" / "accelerate" / "accelerate.yaml"), "--main_process_port", str(port), __file__,
            "--be-a-rank", str(self._marks), *settings, f"run.name={name}", "run.resume=auto",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (directory / f"{name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def phase(self, rank: int) -> int:
        with self._marks.open("rb") as file:
            file.seek(rank)
            return file.read(1)[0]

    def wait_for(self, rank: int, phase: int, seconds: float) -> bool:
        """Whether the rank came to a phase (or, for -1, to any) in time and the launch still lives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            now = self.phase(rank)
            if now == phase or (phase < 0 and now < len(PHASES)):
                return True
            time.sleep(0.0003)
        return False

    def kill(self, victim: str) -> float:
        """Kill and wait until every process is gone; gives the seconds that took."""
        launcher = psutil.Process(self.process.pid)
        ranks = sorted(launcher.children(), key=lambda child: child.pid)
        everyone = [launcher, *launcher.children(recursive=True)]
        targets = {"rank 0": ranks[:1], "rank 1": ranks[1:2], "all ranks": ranks, "launcher": [launcher]}[victim]
        started = time.monotonic()
        for target in targets:
            with contextlib.suppress(psutil.NoSuchProcess):
                target.send_signal(signal.SIGKILL)
        self.process.wait(120)
        _, alive = psutil.wait_procs(everyone, timeout=120)
        assert not alive, f"still alive two minutes after a kill: {alive}"
        return time.monotonic() - started


def disturb(
    directory: Path,
    name: str,
    settings: Sequence[str],
    kills: int,
    rng: np.random.Generator,
    finish: Callable[[], None] | None = None,
) -> list[Kill]:
    """Train to the end with so many kills on the way, in every phase in turn; `finish` may train what is left."""
    done: list[Kill] = []
    while True:
        if finish is not None and len(done) == kills:
            finish()
            return done
        launch = Launch(directory, name, settings)
        if len(done) < kills and launch.wait_for(1, -1, 120):
            phase, victim = len(done) % len(PHASES), VICTIMS[int(rng.integers(len(VICTIMS)))]
            time.sleep(float(rng.uniform(0, 0.6)))
            rank = 0 if phase >= 3 else int(rng.integers(2))
            if launch.wait_for(rank, phase, 20):
                time.sleep(float(rng.uniform(0, 0.01)))
                done.append(Kill(victim, PHASES[min(launch.phase(rank), len(PHASES) - 1)], launch.kill(victim)))
                print(
                    f"{name}: killed {victim} during {done[-1].phase}, ended in {done[-1].seconds_to_end:.1f} s",
                    flush=True,
                )
                continue
        code = launch.process.wait(900)
        if code:
            raise SystemExit(f"{name} ended with {code}; see {directory / name}.log")
        return done


def left_behind(run: Path) -> dict[str, Any]:
    """Everything that a run leaves, without what a clock measured; hosts without the main process have less."""
    kept: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        place = str(path.relative_to(run))
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            kept[place] = [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]
        elif path.suffix == ".safetensors" or path.name in ("agent.json", "lineage.jsonl"):
            kept[place] = path.read_bytes()
        elif path.name == "state.json":
            state = json.loads(path.read_bytes())
            kept[place] = {key: value for key, value in state.items() if key not in MEASURED}
    return kept


def differences(one: Path, other: Path) -> list[str]:
    """The names of what two runs have not left alike."""
    first, second = left_behind(one), left_behind(other)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def drifts(run: Path) -> int:
    """Count the generations in which replicas drifted apart; hosts without the main process have no metrics."""
    path = run / "metrics.jsonl"
    return sum(json.loads(line)["drifts"] > 0 for line in path.read_text().splitlines()) if path.is_file() else 0


def chaos(directory: Path, kills: int, seed: int, cases: Sequence[str]) -> tuple[list[Kill], list[str]]:
    """All kills of all cases, and what differs."""
    rng = np.random.default_rng(seed)
    every: list[Kill] = []
    wrong: list[str] = []
    for number, case in enumerate(cases):
        share = kills // len(cases) + (number < kills % len(cases))
        disturb(directory, case, CASES[case], 0, rng)
        every += disturb(directory, f"{case}-killed", CASES[case], share, rng)
        runs = [directory / "runs" / name for name in (case, f"{case}-killed")]
        wrong += [f"{case}: {name}" for name in differences(*runs)]
        wrong += [f"{case}: replicas drifted" for run in runs if drifts(run)]
    return every, wrong


def be_a_rank(arguments: Sequence[str]) -> int:
    """Train as demos/online.py does, and leave word of every phase in a file."""
    with Path(arguments[0]).open("r+b") as marks:
        memory = mmap.mmap(marks.fileno(), 0)
    rank, measure = int(os.environ["RANK"]), Stopwatch.__call__

    @contextlib.contextmanager
    def marked(self: Stopwatch, name: str) -> Iterator[None]:
        before = memory[rank]
        memory[rank] = PHASE_OF.get(name, before)
        with measure(self, name):
            yield
        memory[rank] = before

    Stopwatch.__call__ = marked  # type: ignore[method-assign]
    spec = importlib.util.spec_from_file_location("online", ROOT / "demos" / "online.py")
    assert spec is not None
    assert spec.loader is not None
    online = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(online)
    return run_program(online.main, arguments[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=56)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append", choices=CASES)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        kills, wrong = chaos(Path(directory), parsed.kills, parsed.seed, parsed.case or list(CASES))
    counts = Counter((kill.phase, kill.victim) for kill in kills)
    print("\n| killed | " + " | ".join(PHASES) + " | longest end |\n" + "|---" * (len(PHASES) + 2) + "|")
    for victim in VICTIMS:
        slowest = max((kill.seconds_to_end for kill in kills if kill.victim == victim), default=0.0)
        print(f"| {victim} | " + " | ".join(str(counts[phase, victim]) for phase in PHASES) + f" | {slowest:.1f} s |")
    print(f"\n{len(kills)} kills; " + (f"DIFFERENT: {', '.join(wrong)}" if wrong else "all runs ended alike"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(be_a_rank(sys.argv[2:]) if sys.argv[1:2] == ["--be-a-rank"] else main())
