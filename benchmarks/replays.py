"""Train single agents with winners' schedules, and with their last settings held constant; append one line per agent.

    python benchmarks/replays.py runs/evidence/cartpole-low-1 ... [--seeds 101 102] [--data FILE]

Runs that have a line are not repeated. Each agent is scored as in benchmarks/evidence.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from evidence import HELD_OUT, course
from records import DATA, EVORL, append, evaluated, read_lines, revision

LINES = DATA / "replays.jsonl"
KINDS = {"schedule": (), "constant": ("--constant",)}


def replay(winner: Path, kind: str, seed: int) -> dict[str, Any]:
    """Train one agent with a winner's schedule or its last settings, and return its line."""
    name = f"{winner.name}-{kind}-{seed}"
    command = [sys.executable, "-c", EVORL, "retrain", str(winner), *KINDS[kind], f"seed={seed}", f"run.name={name}"]
    code = revision()
    with (winner.parent / f"{name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    run = winner.parent / name
    rows = read_lines(run / "metrics.jsonl")
    return {
        "winner": winner.name,
        "kind": kind,
        "seed": seed,
        "revision": code,
        **course(rows),
        "held_out": evaluated(run, HELD_OUT, seed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("winners", type=Path, nargs="+", help="directories of runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103, 104, 105])
    parser.add_argument("--data", type=Path, default=LINES)
    parsed = parser.parse_intermixed_args()
    done = {(line["winner"], line["kind"], line["seed"]) for line in read_lines(parsed.data)}
    for seed in parsed.seeds:
        for winner in parsed.winners:
            for kind in KINDS:
                if (winner.name, kind, seed) not in done:
                    append(parsed.data, line := replay(winner, kind, seed))
                    print(winner.name, kind, seed, line["held_out"]["mean"], flush=True)


if __name__ == "__main__":
    main()
