"""`evorl lineage`: the ancestors of a run's best agent, and the mutation that produced each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import groupby

from evorl.commands.command import Command, add_run
from evorl.config.errors import on_one_line
from evorl.runs.ancestry import SAME, Stage, ancestry, reader_of
from evorl.runs.directory import load_elite
from evorl.system.console import aligned, digits

HEADINGS = ("agent", "generations", "fitness", "what made it")


def rows_of(stages: Sequence[Stage], use: Callable[[str, float], float]) -> list[tuple[str, ...]]:
    """Return one table row per agent of a lineage, the initial one first."""
    rows: list[tuple[str, ...]] = []
    for number, group in groupby(stages, key=lambda stage: stage.id):
        own = list(group)
        first, last = own[0], own[-1]
        lived = f"{first.generation}" if first is last else f"{first.generation} to {last.generation}"
        scores = [stage.fitness for stage in (first, last) if stage.fitness is not None]
        fitness = " to ".join(digits(score) for score in dict.fromkeys(scores)) or "-"
        born = "" if first.mutation == SAME else str(first.mutation.as_used(use))
        rows.append((f"#{number}", lived, fitness, on_one_line(born)))
    return rows


def _run(parsed: argparse.Namespace) -> None:
    print("\n".join(aligned([HEADINGS, *rows_of(ancestry(parsed.run), reader_of(load_elite(parsed.run)[0]))])))


COMMAND = Command(run=_run, arguments=add_run, examples=("evorl lineage runs/my-run",))
