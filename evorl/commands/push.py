"""`evorl push`: a run's best agent as a model page of the Hugging Face Hub."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from evorl.commands.command import Command
from evorl.export.hub import check_hub, push, write_page
from evorl.types import UserError


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("name", help="of the page, such as ME/ppo-CartPole-v1")
    parser.add_argument("--private", action="store_true", help="let only you see it, where it is a new one")
    parser.add_argument("--video", type=Path, metavar="FILE.mp4", help="a film to show, as `evorl watch --video` makes")


def _run(parsed: argparse.Namespace) -> None:
    if parsed.video is not None and not parsed.video.is_file():
        raise UserError(
            f"--video: there is no file {parsed.video}; `evorl watch {parsed.run} --video FILE.mp4` makes one"
        )
    check_hub()
    with tempfile.TemporaryDirectory() as folder:
        files = write_page(parsed.run, Path(folder), parsed.video)
        address = push(Path(folder), parsed.name, parsed.private)
    print(f"{address}: {', '.join(files)}")


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=("evorl push runs/my-run ME/dqn-LunarLander-v3 --video best.mp4",),
)
