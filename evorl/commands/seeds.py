"""`evorl train --seeds`: train several seeds of one configuration and summarise their results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from evorl.commands.command import file_and_assignments
from evorl.commands.inspect import state_of
from evorl.config.errors import on_one_line
from evorl.config.yaml import PACKAGE
from evorl.report.statistics import interval
from evorl.runs.launch import check, read_config
from evorl.runs.read import read_overview
from evorl.system.console import aligned, digits, say
from evorl.types import RunFailed, UserError

PIECE = 0.5
"""Seconds between checks whether all runs have ended."""
HEADINGS = ("seed", "run", "best", "episodes", "steps", "seconds", "state")


def train_seeds(parsed: argparse.Namespace) -> None:
    """Train each seed with a command of its own, then print a table. Raises UserError, and RunFailed if any failed."""
    seeds = [each for each in parsed.seeds if isinstance(each, int)]
    if not seeds:
        raise UserError("--seeds: give at least one seed, such as --seeds 1 2 3")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds: each seed may be given once, not {' '.join(map(str, seeds))}")
    file, given = file_and_assignments([*parsed.words, *(each for each in parsed.seeds if isinstance(each, str))])
    if "seed" in (word.partition("=")[0] for word in given):
        raise UserError("seed: --seeds sets it for each run; leave one of them out")
    config = check(read_config(file, given))
    plain = f"{config.algorithm.name}-{config.environment.id.split(':')[-1].replace('/', '-')}"
    name = parsed.name or config.run.name or plain
    runs = [(number, config.run.directory / f"{name}-seed-{number}") for number in seeds]
    several = ["--processes", str(parsed.processes)] if parsed.processes > 1 else []
    program = [sys.executable, "-P", "-m", "evorl", "train", *several, str(file), *given]
    commands = [
        (number, [*program, f"seed={number}", f"run.name={json.dumps(path.name)}", "run.resume=auto"])
        for number, path in runs
    ]
    codes = train_each(commands, min(parsed.jobs or 1, len(seeds)))
    print("\n".join(summary_lines([(number, path) for number, path in runs if (path / "config.yaml").is_file()])))
    if failed := [str(number) for number, code in codes.items() if code]:
        raise RunFailed(f"seed {', '.join(failed)} did not finish; repeat the command to resume")


@dataclass
class Processes:
    """The training processes in progress; on SIGTERM they shut down cleanly and keep their checkpoints."""

    running: set[subprocess.Popen[str]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False

    def train(self, number: int, command: Sequence[str]) -> int:
        """Run a training process, its output lines prefixed by its seed; return its exit code, 1 if not started."""
        with self.lock:
            if self.over:
                return 1
            # The package comes first on the path, so that no other `evorl` is imported instead.
            path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
            process = subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            self.running.add(process)
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                say(f"seed {number} | {line.rstrip()}")
        code = process.wait()
        with self.lock:
            self.running.discard(process)
        return code

    def end(self) -> None:
        """Terminate all training processes and prevent new ones."""
        with self.lock:
            self.over = True
            for process in self.running:
                process.terminate()


def train_each(commands: Sequence[tuple[int, Sequence[str]]], jobs: int) -> dict[int, int]:
    """Run each seed's command, `jobs` at a time; return the exit codes by seed."""
    processes = Processes()
    with ThreadPoolExecutor(jobs) as pool:
        begun = {number: pool.submit(processes.train, number, command) for number, command in commands}
        try:
            # Poll: a signal that another thread receives does not interrupt a wait.
            while wait(begun.values(), PIECE).not_done:
                pass
            return {number: future.result() for number, future in begun.items()}
        except BaseException:
            processes.end()
            raise


def summary_lines(runs: Sequence[tuple[int, Path]]) -> list[str]:
    """Format one row per seed, then the mean over seeds of the best agents' scores and the number solved."""
    rows, best, solved, targets = [], [], 0, 0
    for number, path in runs:
        record = read_overview(path)
        told = record.summary
        reached = told.get("best_fitness")
        shown = "-"
        if isinstance(reached, int | float):
            best.append(float(reached))
            shown = digits(reached)
        targets += told.get("solved") is not None
        solved += told.get("solved") is True
        rows.append((
            str(number), path.name, shown, str(told.get("best_fitness_episodes", "-")),
            f"{told.get('agent_steps', 0):,}", f"{told.get('wall_clock_seconds', 0):.0f}", state_of(record),
        ))  # fmt: skip
    return [*map(on_one_line, aligned([HEADINGS, *rows])), _together(best, solved, targets, len(runs))]


def _together(best: Sequence[float], solved: int, targets: int, number: int) -> str:
    words = f"no seed of {number} has an agent"
    if best:
        _, mean, low, high = interval(best)
        spread = "" if low is None or high is None else f" (95 % interval {digits(low)} to {digits(high)})"
        words = f"best agents of {len(best)} seed{'s' if len(best) > 1 else ''}: mean {digits(mean)}{spread}"
    return f"{words}; solved: {solved} of {number}" if targets else words
