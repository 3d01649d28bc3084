"""`evorl watch`, `report`, `plot`, `export` and `push`: commands that render or publish runs and agents.

Each imports what it needs by itself, since most of it is optional.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import evorl
from evorl.system.console import digits
from evorl.system.extras import require
from evorl.system.files import check_folder, write_atomically
from evorl.types.outcomes import UserError

if TYPE_CHECKING:
    from evorl.runs.output.video import Image
    from evorl.runs.reading.loaded import LoadedAgent


def watch(parsed: argparse.Namespace) -> None:
    from evorl.commands.evaluate import seeds_of
    from evorl.envs.games import is_game
    from evorl.envs.vector import for_evaluation, stacked_frames
    from evorl.runs.output.video import check_video, play, write_video
    from evorl.runs.reading.loaded import load
    from evorl.runs.storage.trust import refuse_code
    from evorl.system.console import has_display

    if parsed.video is not None:
        check_video(parsed.video)
    elif not has_display():
        raise UserError("watch: there is no display for a window; use --video FILE.mp4")
    agent = load(parsed.run, agent=parsed.agent, generation=parsed.generation, allow_code=parsed.allow_code)
    refuse_code(agent.config, parsed.allow_code)
    if is_game(agent.config.environment.id):
        raise UserError(f"watch: {agent.config.environment.id} is a game, which is not shown; use `evorl play`")
    if parsed.video is None and stacked_frames(for_evaluation(agent.config.evaluation_environment)):
        raise UserError(f"watch: {agent.config.environment.id} has no window; use --video FILE.mp4")
    seeds, most = seeds_of(parsed.seed, parsed.episodes), agent.config.evaluation.max_steps
    returns: list[float] = []

    def images() -> Iterator[tuple[Image, float]]:
        for image, gained, rate in playing:
            if gained is not None:
                returns.append(gained)
            if image is not None:
                yield image, rate

    mode = "human" if parsed.video is None else "rgb_array"
    with closing(play(agent, agent.config.evaluation_environment, seeds, most, mode)) as playing:
        if parsed.video is None:
            for _ in images():
                pass
        else:
            shown = write_video(parsed.video, images())
            print(f"{parsed.video}: {shown} frames")
    mean, listed = sum(returns) / len(returns), ", ".join(map(digits, returns))
    episodes = "1 episode" if len(returns) == 1 else f"{len(returns)} episodes"
    print(f"agent {agent.agent.id}: mean return {digits(mean)} over {episodes} ({listed})")


def report(parsed: argparse.Namespace) -> None:
    from evorl.report.data import load_several
    from evorl.report.page import page

    require("report", "a report")
    if parsed.output is not None:
        check_folder(parsed.output)
    runs = load_several(parsed.runs)
    output = parsed.output or (parsed.runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    text = page(runs).encode()
    write_atomically(output, text)
    print(f"{output} ({len(text) / 1e6:.1f} MB; opens in any browser, offline)")


def plot(parsed: argparse.Namespace) -> None:
    from evorl.report.data import load_several
    from evorl.report.picture import check_output, draw

    require("plot", "a plot")
    runs = load_several(parsed.runs)
    output = parsed.output or (parsed.runs[0] / "plot.png" if len(runs) == 1 else Path("plot.png"))
    check_output(output)
    replaced = " (replaces the one before)" if output.exists() else ""
    draw(runs, output, parsed.hyperparameter)
    print(f"{output}{replaced}")


def export(parsed: argparse.Namespace) -> None:
    from evorl.export.onnx_file import in_float32, write_onnx
    from evorl.runs.reading.hub import is_on_hub
    from evorl.runs.reading.loaded import load
    from evorl.runs.storage.directory import EXPORTED

    require("onnx", "an export")
    if parsed.output is not None:
        if parsed.output.suffix != ".onnx":
            raise UserError(f"--output: {parsed.output} will be an ONNX file; give it the ending .onnx")
        check_folder(parsed.output)
    saved = load(parsed.run, agent=parsed.agent, generation=parsed.generation, allow_code=parsed.allow_code)
    here = Path() if is_on_hub(parsed.run) else parsed.run
    is_best = parsed.agent is None and parsed.generation is None
    of = "" if parsed.generation is None else f"-generation-{parsed.generation}"
    default_name = EXPORTED if is_best else f"agent-{saved.agent.id}{of}.onnx"
    loaded, output = in_float32(saved), parsed.output or here / default_name
    difference = write_onnx(loaded, output, facts_of(loaded))
    exact = "" if loaded is saved else "; exported in float32, although the agent was trained in bfloat16"
    close = f"within {difference:.1g} of" if difference else "exactly equal to"
    print(f"{output}: agent {loaded.agent.id}, {close} `predict`{exact}")


def facts_of(loaded: LoadedAgent) -> dict[str, str]:
    """Return the metadata of an agent's ONNX file."""
    return {
        "environment": loaded.config.environment.id,
        "algorithm": loaded.config.algorithm.name,
        "agent": str(loaded.agent.id),
        "hyperparameters": json.dumps(loaded.agent.hyperparameters),
        "made_with": f"evorl {evorl.__version__}",
    }


def push(parsed: argparse.Namespace) -> None:
    from evorl.export import hub

    if parsed.video is not None and not parsed.video.is_file():
        run = shlex.quote(str(parsed.run))
        raise UserError(f"--video: there is no file {parsed.video}; `evorl watch {run} --video FILE.mp4` makes one")
    hub.check_hub(parsed.name)
    with tempfile.TemporaryDirectory() as folder:
        files = hub.write_page(parsed.run, Path(folder), parsed.name, parsed.video)
        address = hub.push(Path(folder), parsed.name, parsed.private)
    print(f"{address}: {', '.join(files)}")
