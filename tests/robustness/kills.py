"""Kill small runs of every system and placement at random moments, and compare what they leave with runs left alone.

    OMP_NUM_THREADS=1 python tests/robustness/kills.py [--kills 20] [--seed 1] [--case NAME ...] [--told 0.3]
        [--directory DIR] [--out FILE.json]

A seed decides which runs there are, how often each is killed (up to three times), who is killed, when, and whether the
launcher starts the ranks again or the run is resumed by hand. A moment is an event of the undisturbed run and a time
after it, uniform over the time that the process would have taken to its end. Ranks are forked from this process, with a
stand-in for the launcher. A share of the kills is SIGTERM, at which ranks save within the generation and end together;
the others are SIGKILL. A run must end with code 0, without a traceback or drifting replicas, and leave what the one
that was left alone leaves, byte for byte, except for what a clock measured.

With a directory, undisturbed runs stay there for the next call, and so do the runs that ended otherwise. The table has
a row for each kill, and one for each moment that came too late, when the run had ended. Exits with 1 if anything ended
otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from launches import Main
from systems import CASES, PLACEMENTS
from timeline import PHASES, ROOT
from trials import SIGNALS, VICTIMS, Plan, disturb

from evorl.runs.launch import load_config
from evorl.runs.train import main_of

Row = dict[str, Any]


def imported(cases: Sequence[str]) -> Main:
    """Return the training program once everything is imported that runs of these cases will use."""
    sys.path.append(str(ROOT / "tests"))  # Where environments are found.
    for case in cases:
        load_config(CASES[case], ROOT / "configs" / "training" / "dqn.yaml")
    main = main_of(ROOT / "demos" / "online.py")
    return lambda arguments: main(arguments, ())


def tables(rows: Sequence[Row]) -> str:
    """Add up kills by system and placement, and by victim, signal and phase."""
    kills = [row for row in rows if not row["too_late"]]

    def counted(what: str, names: Sequence[str], by: str, columns: Sequence[str]) -> list[str]:
        lines = [f"| {what} | {' | '.join(columns)} | identical | longest end |", "|---" * (len(columns) + 3) + "|"]
        for name in names:
            here = [row for row in kills if row[what] == name]
            counts = Counter(row[by] for row in here)
            numbers = " | ".join(str(counts[column]) for column in columns)
            well = sum(row["outcome"] == "identical" for row in here)
            slowest = max((row["seconds_to_end"] for row in here), default=0.0)
            lines += [f"| {name} | {numbers} | {well} of {len(here)} | {slowest:.1f} s |"] * bool(here)
        return [*lines, ""]

    lines = counted("case", list(CASES), "placement", list(PLACEMENTS))
    lines += counted("victim", VICTIMS, "phase", PHASES)
    lines += counted("signal", SIGNALS, "phase", PHASES)
    runs = {row["run"]: row["outcome"] for row in rows}
    wrong = {name: outcome for name, outcome in runs.items() if outcome != "identical"}
    killed = {row["run"] for row in kills}
    lines.append(
        f"{len(kills)} kills of {len(killed)} runs, and {len(rows) - len(kills)} that came when the run had ended; "
        f"{len(runs) - len(wrong)} of {len(runs)} runs ended as if left alone"
    )
    return "\n".join([*lines, *(f"DIFFERENT {name}: {outcome}" for name, outcome in wrong.items())])


def play(parsed: argparse.Namespace, directory: Path) -> Iterator[list[Row]]:
    """Play the runs that a seed decides, until there have been as many kills as asked for; give each one's rows."""
    cases, done, number = parsed.case or list(CASES), 0, 0
    program = imported(cases)
    directory.mkdir(parents=True, exist_ok=True)
    while done < parsed.kills:
        plan = Plan.draw(np.random.default_rng([parsed.seed, number]), cases, parsed.told)
        plan = replace(plan, kills=plan.kills[: parsed.kills - done])
        began = time.monotonic()
        kills = disturb(program, directory, f"killed-{parsed.seed}-{number}", plan)
        phases = ", ".join(f"{kill.victim} in {kill.phase or 'a run that had ended'}" for kill in kills)
        print(f"{kills[0].run}: {plan.case}, {plan.placement}: {phases}: {kills[0].outcome}", end=" ")
        print(f"({time.monotonic() - began:.1f} s)", flush=True)
        done += sum(not kill.too_late for kill in kills)
        number += 1
        yield [asdict(kill) for kill in kills]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--told", type=float, default=0.3, help="the share of kills by SIGTERM")
    parser.add_argument("--directory", type=Path, help="where undisturbed runs stay for the next call")
    parser.add_argument("--out", type=Path, help="where the table of all kills is written")
    parsed = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for more in play(parsed, (parsed.directory or Path(name)).resolve()):
            rows += more
            if parsed.out:
                parsed.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(tables(rows))
    return int(any(row["outcome"] != "identical" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
