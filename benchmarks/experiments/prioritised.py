"""Cost of prioritised replay per vector step of all agents with its updates, compared with uniform sampling.

    OMP_NUM_THREADS=1 python benchmarks/experiments/prioritised.py [--population 8] [--updates 8] [--rounds 8] [key=value ...]

Kinds take turns, each with a full replay. Times are CPU milliseconds of this process per vector step in the fastest
round, since other processes can only slow a round down. `share` is the fraction of time spent sampling, weighting,
inserting and updating priorities; it excludes `gather`, which every kind needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evorl.runs.launch import load_config
from evorl.runs.program import run_program

sys.path.append(str(Path(__file__).parents[1]))
from throughput import Trainer

CONFIG = Path(__file__).parents[2] / "configs" / "training" / "dqn.yaml"
KINDS = {
    "uniform": (),
    "prioritised": ("replay.prioritised={}",),
    "prioritised, windows of 3 steps": ("replay.prioritised={}", "replay.n_step=3"),
    "uniform, a replay for each agent": ("replay.shared=false",),
}
SAMPLER = ("report", "agree", "draw", "observe")
ENVIRONMENTS = 4
STEPS = 50


class Timed:
    """A proxy that accumulates the CPU seconds of some of an object's methods."""

    def __init__(self, inner: Any, methods: Sequence[str], seconds: dict[str, float]) -> None:
        self._inner = inner
        for name in methods:
            setattr(self, name, timed(getattr(inner, name), name, seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def timed(method: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Wrap a method so that it adds its CPU seconds to `seconds[name]`."""

    def call(*arguments: Any) -> Any:
        began = time.process_time()
        result = method(*arguments)
        seconds[name] += time.process_time() - began
        return result

    return call


class Measured:
    """A population with a full replay, whose vector steps are timed."""

    def __init__(self, settings: Sequence[str]) -> None:
        self._trainer = Trainer(load_config(settings, CONFIG))
        self._seconds: dict[str, float] = defaultdict(float)
        self._trainer.begin()
        while self._trainer.step() == 0:
            pass
        experience: Any = self._trainer.experience
        experience.sampler = Timed(experience.sampler, SAMPLER, self._seconds)
        experience.windows = Timed(experience.windows, ("gather",), self._seconds)
        self.rounds: list[dict[str, float]] = []

    def round(self) -> None:
        """Time a round of `STEPS` vector steps."""
        self._seconds.clear()
        began = time.process_time()
        for _ in range(STEPS):
            self._trainer.step()
        whole = time.process_time() - began
        self.rounds.append({name: 1e3 * each / STEPS for name, each in {"step": whole, **self._seconds}.items()})

    def line(self) -> dict[str, float]:
        """Return the ms per vector step of each part in its fastest round, and the sampler's share."""
        fastest = {name: min(each[name] for each in self.rounds) for name in self.rounds[0]}
        sampler = sum(fastest.get(name, 0.0) for name in SAMPLER)
        shown = {name: round(value, 3) for name, value in fastest.items()}
        return shown | {"share": round(sampler / fastest["step"], 3)}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--population", type=int, default=8)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parsed, overrides = parser.parse_known_args(arguments)
    settings = (
        f"population.size={parsed.population}", f"environment.num_envs={ENVIRONMENTS}", "algorithm.batch_size=128",
        f"algorithm.learn_step={ENVIRONMENTS / parsed.updates}", "algorithm.split_batches=false",
        "replay={capacity: 100000, learning_starts: 100000}", *overrides,
    )  # fmt: skip
    measured = {kind: Measured([*settings, *own]) for kind, own in KINDS.items()}
    for _ in range(parsed.rounds):
        for one in measured.values():
            one.round()
    for kind, one in measured.items():
        print(json.dumps({"replay": kind, "population": parsed.population, "updates": parsed.updates} | one.line()))


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
