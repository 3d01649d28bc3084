"""`evorl report`: a self-contained HTML report on a run, or a comparison of several."""

from __future__ import annotations

import argparse
from pathlib import Path

from evorl.commands.command import Command
from evorl.report.data import load
from evorl.report.page import check_packages, page
from evorl.system.files import write_atomically


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of runs; several are compared")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="the page; report.html in the run, or here for several"
    )


def _run(parsed: argparse.Namespace) -> None:
    check_packages()
    runs = [load(path) for path in parsed.runs]
    output = parsed.output or (parsed.runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    text = page(runs).encode()
    write_atomically(output, text)
    print(f"{output} ({len(text) / 1e6:.1f} MB; it opens in any browser, without a network)")


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=(
        "evorl report runs/my-run",
        "evorl report runs/ppo-1 runs/ppo-2 runs/ppo-3 --output ppo.html",
    ),
)
