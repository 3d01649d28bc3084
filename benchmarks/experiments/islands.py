"""Compare islands with their twins, which do not evolve: the table of docs/evidence.md, and pairs of experiments.

    python benchmarks/experiments/islands.py
    python benchmarks/experiments/islands.py RUN [RUN ...] --revision REVISION [--note KEY=VALUE ...]

A line of benchmarks/data/islands.jsonl.gz has the means of the best agents of a run's islands and of their twins over
fresh episodes, [evolved, without]; one without a fitness is below all others, and in no mean. Lines with the same
notes, such as `founders`, are one experiment. Experiments with the same seeds are also compared with each other, island
by island; their islands begin with the same agents where the notes on founders and the algorithm are the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evorl.runs.agents.comparison import comparison_of

sys.path.append(str(Path(__file__).parents[1]))
from records import DATA, read_lines, replace_lines

LINES = DATA / "islands.jsonl.gz"
OF_RUN = ("seed", "revision", "machine", "agent_steps", "evaluation_steps", "pairs")
"""The fields of a line that are no notes."""
Line = Mapping[str, Any]


def record(run: Path, code: str, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Build the line of a finished run of revision `code`. Raises KeyError without a comparison."""
    summary = json.loads((run / "summary.json").read_text())
    pairs = [[pair["evolved"], pair["control"]] for pair in summary["comparison"]["pairs"]]
    return {
        **notes,
        "seed": int(run.name.rpartition("-")[2]),
        "revision": code,
        "machine": read_lines(run / "metrics.jsonl")[-1]["made_with"]["cpu"],
        "agent_steps": summary["agent_steps"],
        "evaluation_steps": summary["evaluation_steps"],
        "pairs": [[None if value is None else round(value, 1) for value in pair] for pair in pairs],
    }


def experiment(line: Line) -> str:
    """The notes of a line in words: the experiment that it belongs to."""
    return ", ".join(f"{key} {value}" for key, value in sorted(line.items()) if key not in OF_RUN)


def identity(line: Line) -> tuple[Any, ...]:
    """The fields by which a run recorded again is recognised."""
    return experiment(line), line["seed"]


def counts(first: Sequence[float | None], second: Sequence[float | None]) -> str:
    """How often `first` ends higher than `second`, with the exact sign test, and the mean and median difference."""
    result = comparison_of(list(zip(first, second, strict=True)), 0)
    differing = result["higher"] + result["lower"]
    if not differing:
        return "none differs | "
    low, high = result["interval"]
    difference = np.array(first, dtype=float) - np.array(second, dtype=float)
    difference = difference[np.isfinite(difference)]
    error = difference.std(ddof=1) / len(difference) ** 0.5
    return (
        f"{result['higher']} of {differing}: {result['share']:.2f} ({low:.2f} to {high:.2f}), p {result['p']:.2g} | "
        f"{difference.mean():.0f} ± {error:.0f}, median {np.median(difference):.0f}"
    )


def row(pairs: Sequence[Sequence[float | None]]) -> str:
    """The cells of an experiment: islands with evolution / their twins."""
    both = np.array(pairs, dtype=float).T
    columns = (
        [f"{np.nanmean(values):.1f}" for values in both],
        [f"{np.nanmedian(values):.1f}" for values in both],
        [f"{(values >= 200).sum()}" for values in both],
        [f"{(values < 100).sum()}" for values in both],
        [f"{np.nanmin(values):.1f}" for values in both],
    )
    return " | ".join([counts(*zip(*pairs, strict=True)), *(" / ".join(column) for column in columns)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directories of runs, named NAME-SEED")
    parser.add_argument("--revision", help="of the code that trained the runs")
    parser.add_argument("--note", action="append", default=[], metavar="KEY=VALUE", help="what tells the experiment")
    parsed = parser.parse_args()
    if parsed.runs and parsed.revision is None:
        parser.error("--revision: name that of the code that trained the runs")
    if wrong := [note for note in parsed.note if "=" not in note]:
        parser.error(f"--note {wrong[0]}: a note has the form KEY=VALUE")
    notes = dict(note.split("=", 1) for note in parsed.note)
    new = [record(run, parsed.revision, notes) for run in parsed.runs]
    lines = replace_lines(LINES, new, identity) if new else read_lines(LINES)
    experiments: dict[str, dict[int, list[list[float | None]]]] = defaultdict(dict)
    for line in lines:
        experiments[experiment(line)][line["seed"]] = line["pairs"]
    print("| experiment | ends higher | difference | mean return | median | 200 or above | below 100 | lowest |")
    print("|---" * 8 + "|")
    for name, by_seed in experiments.items():
        print(f"| {name} | {row([pair for pairs in by_seed.values() for pair in pairs])} |")
    print("\nAll pairs of experiments with the same seeds, most of them not planned; p is not corrected for that.\n")
    print("| islands of | and of | the first end higher | difference |\n|---|---|---|---|")
    for (name, first), (other, second) in itertools.combinations(experiments.items(), 2):
        if first.keys() == second.keys():
            means = [[pair[0] for seed in sorted(runs) for pair in runs[seed]] for runs in (first, second)]
            print(f"| {name} | {other} | {counts(*means)} |")


if __name__ == "__main__":
    main()
