"""`evorl plot`: a plot of a run, or of several with their mean and its confidence interval."""

from __future__ import annotations

import argparse
from pathlib import Path

from evorl.commands.command import Command
from evorl.report.data import load
from evorl.report.picture import check_output, draw
from evorl.report.statistics import MEASURES


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of runs; several are compared")
    parser.add_argument("--output", "-o", type=Path, default=Path("plot.png"), help="a .png, .svg or .pdf file")
    parser.add_argument("--measure", choices=tuple(MEASURES), default="best", help="what to compare several runs by")
    parser.add_argument("--hyperparameter", metavar="NAME", help="one to draw below the returns of a single run")


def _run(parsed: argparse.Namespace) -> None:
    check_output(parsed.output)
    draw([load(path) for path in parsed.runs], parsed.output, parsed.measure, parsed.hyperparameter)
    print(parsed.output)


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=(
        "evorl plot runs/my-run --hyperparameter learning_rate --output run.png",
        "evorl plot runs/ppo-1 runs/ppo-2 runs/ppo-3 --output ppo.svg",
    ),
)
