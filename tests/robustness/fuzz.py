"""Give `evorl` hostile runs and mistyped command lines, and see that it only ever refuses them or does as it is told.

    OMP_NUM_THREADS=1 python tests/robustness/fuzz.py [--of inputs|ancestry|readers] [--count 10000]
        [--seed 1] [--only N] [--family TEXT] [--store FOLDER]

Each input is tried on a copy of a small run, in a forked process that watches itself. What is promised: nothing of the
directory is executed, nothing outside it is written, nobody on the network is asked; the exit code is 0 or 2, with one
printable line of error or none; and it takes at most 5 s and 500 MB. A resumed run is followed up to its first step.
`--of inputs` gives hostile files and command lines to `evaluate` and `resume`, `--of ancestry` lineages to `lineage`,
`--of readers` spoiled runs to every command that reads one. Prints a table by family, and exits with 1
if a promise was broken; `--only` tries one again and shows what it says, `--store` keeps the first input of each
problem.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from fuzz_ancestry import ANCESTRY
from fuzz_files import FILES
from fuzz_places import FOLDERS
from fuzz_readers import READERS, warm
from fuzz_rooms import Bench, Case, workshop
from fuzz_texts import TEXTS, Family
from fuzz_watch import TRACEBACK, Outcome

FAMILIES = (*TEXTS, *FILES, *FOLDERS)
SETS = {"inputs": FAMILIES, "ancestry": ANCESTRY, "readers": READERS}
"""Each has numbers of its own, since an input's number says which of so many families it is of."""
LIKE = 80
"""Letters in which problems are of one kind, of which only the first is told at once."""
COLUMNS = ("family", "inputs", "refused", "accepted", "slowest s", "most MB", "tracebacks", "wrong")


def drawn(bench: Bench, number: int, seed: int, families: Sequence[Family] = FAMILIES) -> Case:
    """Input `number`, whatever was tried before it; the families come in turn."""
    return families[number % len(families)](np.random.default_rng([seed, number]), bench.template)


def outcomes(
    bench: Bench, count: int, seed: int, family: str = "", families: Sequence[Family] = FAMILIES
) -> Iterator[tuple[int, Case, Outcome]]:
    """Try the first `count` inputs, of these those whose family's name has this text in it."""
    for number in range(count):
        case = drawn(bench, number, seed, families)
        if family in case.family:
            yield number, case, bench.tried(case)


def table(tried: dict[str, list[Outcome]]) -> str:
    """What came of each family, and of all of them together."""
    rows = [*tried.items(), ("all", [outcome for each in tried.values() for outcome in each])]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, each in rows:
        wrong = sum(bool(outcome.problems) for outcome in each)
        traced = sum(any(problem.startswith(TRACEBACK) for problem in outcome.problems) for outcome in each)
        refused, accepted = (sum(outcome.code == code and not outcome.problems for outcome in each) for code in (2, 0))
        slowest = max((outcome.seconds for outcome in each), default=0.0)
        most = max((outcome.megabytes for outcome in each), default=0.0)
        lines.append(
            f"| {name} | {len(each)} | {refused} | {accepted} | {slowest:.2f} | {most:.0f} | {traced} | {wrong} |"
        )
    return "\n".join(lines)


def show(bench: Bench, number: int, seed: int, families: Sequence[Family]) -> bool:
    """Try one input, print all that is known of it, and give whether a promise was broken."""
    case = drawn(bench, number, seed, families)
    outcome = bench.tried(case)
    print(f"{number} {case.family}: evorl {' '.join(map(repr, case.arguments))[:2000]}")
    print(f"exit code {outcome.code}, {outcome.seconds:.2f} s, {outcome.megabytes:.0f} MB")
    for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        print(f"--- {name}\n{text[-5000:]!r}" if not text[-5000:].isascii() else f"--- {name}\n{text[-5000:]}")
    print("--- wrong\n" + "\n".join(outcome.problems or ["nothing"]))
    return bool(outcome.problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further input after so many")
    parser.add_argument("--only", type=int, metavar="N", help="try input N and show its output")
    parser.add_argument("--family", default="", help="only families whose name has this text in it")
    parser.add_argument("--of", choices=tuple(SETS), default="inputs", help="what is tried, and by which commands")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep the first input of each problem here")
    options = parser.parse_args()
    families = SETS[options.of]
    tried: dict[str, list[Outcome]] = defaultdict(list)
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    with workshop(warm if families is READERS else None) as bench:
        if options.only is not None:
            return int(show(bench, options.only, options.seed, families))
        began = time.perf_counter()
        for number, case, outcome in outcomes(bench, options.count, options.seed, options.family, families):
            tried[case.family].append(outcome)
            for problem in outcome.problems:
                alike = kinds[case.family, re.sub(r"\d+", "#", problem)[:LIKE]]
                alike.append(number)
                if len(alike) == 1:
                    print(f"{number} {case.family}: {problem}", flush=True)
                    if options.store is not None:
                        bench.store(case, options.store.absolute() / str(number))
            if time.perf_counter() - began > 60 * options.minutes:
                break
        seconds = time.perf_counter() - began
    print(f"\n{table(tried)}\n\n{sum(map(len, tried.values()))} inputs in {seconds:.0f} s, seed {options.seed}")
    for (family, problem), numbers in kinds.items():
        print(f"{len(numbers)} of {family}: {problem} (--only {' or '.join(map(str, numbers[:3]))})")
    return int(bool(kinds))


if __name__ == "__main__":
    sys.exit(main())
