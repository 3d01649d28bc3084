"""`evorl watch`: show an agent's episodes, in a window or as a video."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from evorl.commands.command import Command, add_run, count, seed
from evorl.commands.evaluate import seeds_of
from evorl.runs.loaded import load
from evorl.runs.trust import refuse_code
from evorl.runs.video import Image, check_video, play, write_video
from evorl.system.console import digits
from evorl.types import UserError


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--video", type=Path, metavar="FILE.mp4", help="write a film instead of opening a window")
    parser.add_argument("--episodes", type=count, default=3)
    parser.add_argument("--seed", type=seed, default=0, help="of the episodes, which `evorl evaluate` counts too")
    parser.add_argument("--agent", type=int, metavar="ID", help="an agent of a checkpoint (default: the best one)")
    parser.add_argument("--generation", type=count, metavar="N", help="the generation of that checkpoint")


def _run(parsed: argparse.Namespace) -> None:
    if parsed.video is not None:
        check_video(parsed.video)
    elif sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError("watch: there is no display for a window; take --video FILE.mp4")
    agent = load(parsed.run, agent=parsed.agent, generation=parsed.generation, allow_code=parsed.allow_code)
    refuse_code(agent.config, parsed.allow_code)
    seeds, most = seeds_of(parsed.seed, parsed.episodes), agent.config.evaluation.max_steps
    returns: list[float] = []

    def images() -> Iterator[tuple[Image, float]]:
        for image, gained, rate in playing:
            if gained is not None:
                returns.append(gained)
            if image is not None:
                yield image, rate

    mode = "human" if parsed.video is None else "rgb_array"
    with closing(play(agent, agent.config.environment, seeds, most, mode)) as playing:
        if parsed.video is None:
            for _ in images():
                pass
        else:
            shown = write_video(parsed.video, images())
            print(f"{parsed.video}: {shown} frames")
    each = ", ".join(digits(value) for value in returns)
    print(
        f"agent {agent.agent.id}: mean return {digits(float(np.mean(returns)))} over {len(returns)} episodes ({each})"
    )


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=("evorl watch runs/my-run --video best.mp4", "evorl watch runs/my-run --episodes 1 --seed 7"),
)
