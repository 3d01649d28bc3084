"""`evorl schedule`: the hyperparameter schedule of a run's best agent, generation by generation."""

from __future__ import annotations

import argparse

from evorl.commands.command import Command, add_run
from evorl.runs.ancestry import ancestry, reader_of, table
from evorl.runs.directory import load_elite


def _run(parsed: argparse.Namespace) -> None:
    print("\n".join(table(ancestry(parsed.run), reader_of(load_elite(parsed.run)[0]))))


COMMAND = Command(run=_run, arguments=add_run, examples=("evorl schedule runs/my-run",))
