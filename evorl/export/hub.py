"""Publishing a run's best agent as a model page on the Hugging Face Hub: its score, usage, lineage and settings."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from evorl.config.errors import shown
from evorl.config.schema import as_yaml
from evorl.envs.suites import SUITES
from evorl.report.data import Drawn, load
from evorl.report.facts import effect_rows, environment_facts, path_rows, run_facts, state
from evorl.report.picture import draw
from evorl.report.statistics import effects
from evorl.runs.directory import (
    CONFIG,
    ELITE_AGENT,
    ELITE_FACTS,
    EXPORTED,
    INTERFACE,
    LINEAGE,
    METRICS,
    SUMMARY,
    saved_config,
)
from evorl.runs.hub import HUB
from evorl.system.extras import missing, require
from evorl.system.files import read_bounded, reason
from evorl.tracking.tracker import shared_settings
from evorl.types import EvorlWarning, UserError, message_of

PICTURE = "lineage.png"
RESULTS = ".eval_results/evorl.yaml"
"""Evaluation results, in the Hub's format beside the `model-index` of the card."""
GAME_EXTRAS = {"pettingzoo:": "games", "openspiel:": "openspiel"}
"""The extra that games with this prefix need."""
NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""The name of a page, or of a data set."""


def card(run: Drawn, settings: Mapping[str, Any], name: str, files: Sequence[str]) -> str:
    """Return the model card of the page `name`, in Markdown with the YAML metadata that the Hugging Face Hub reads.

    `settings` are the shareable settings, `files` the names of the other files on the page.
    """
    environment, algorithm = str(run.setting("environment.id")), str(run.setting("algorithm.name"))
    best, shared = run.described_best, replace(run, config=dict(settings))
    parts = [
        f"---\n{yaml.safe_dump(_head(run, environment, algorithm), sort_keys=False)}---",
        f"# {_plain(algorithm)} on {_plain(environment)}",
        f"The best agent of a population, trained and evolved by evorl: a {_plain(run.score_name)} of **{best}** "
        f"({_plain(state(run))}).",
    ]
    parts += [f'<video src="{name}" controls loop muted></video>' for name in files if name.endswith(".mp4")]
    parts += ["## Use", _use(name, environment, files)]
    parts.append("## How it came about")
    parts += [f"![Fitness of all agents, and the winner's path through them]({PICTURE})"] if PICTURE in files else []
    steps = [[row["generation"], row["agent"], row["fitness"], row["changed"]] for row in path_rows(run)]
    parts.append(_table(("generation", "agent", "fitness", "what changed"), [row for row in steps if row[3]][-30:]))
    found = effect_rows(effects(run))
    parts += [
        "## What mutations did",
        "Change in fitness from a parent to its child one generation later; compare with the row `no mutation`:",
    ]
    names = ("name", "count", "mean", "interval")
    parts.append(
        _table(("mutation", "children", "mean", "95 % interval"), [[row[name] for name in names] for row in found])
    )
    parts += ["## How it was made", _table(("", ""), [*run_facts(shared), *environment_facts(run)])]
    shown = as_yaml(settings).replace("```", "'''")
    parts += ["<details><summary>Configuration</summary>", f"```yaml\n{shown}```", "</details>"]
    return "\n\n".join(parts) + "\n"


def _head(run: Drawn, environment: str, algorithm: str) -> dict[str, Any]:
    last = run.generations[-1]
    head: dict[str, Any] = {
        "library_name": "evorl",
        "tags": ["reinforcement-learning", "deep-reinforcement-learning", "evolution", algorithm, environment],
    }
    if last.elite_fitness is not None:
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        # By convention +/- is the standard deviation of returns here: the Hub's leaderboards rank by it.
        kind = "mean_reward" if run.score_name == "mean return" else run.score_name.replace(" ", "_")
        spread = "" if last.elite_std is None else f" +/- {last.elite_std:.2f}"
        metric = {"type": kind, "value": f"{last.elite_fitness:.2f}{spread}"}
        result = {"task": task, "dataset": {"name": environment, "type": environment}, "metrics": [metric]}
        head["model-index"] = [{"name": f"{algorithm}-{environment}", "results": [result]}]
    return head


def evaluation_results(run: Drawn, benchmark: str) -> list[dict[str, Any]]:
    """Return the best agent's score in the format of the Hub's evaluation results, `.eval_results/*.yaml`.

    The format ties a score to a task of a benchmark, a data set on the Hub with a leaderboard. Most environments have
    none, and the `model-index` of the card needs none.
    """
    if run.best is None:
        raise UserError("--benchmark: the run has no best agent yet")
    task = {"id": benchmark, "task_id": str(run.setting("environment.id"))}
    return [{"dataset": task, "value": run.best.mean, "notes": f"{run.score_name}: {run.described_best}"}]


def extras_of(environment: str) -> list[str]:
    """Return the extras of evorl needed to load a page and play in its environment."""
    extras = ["hub", *(suite.extra for suite in SUITES if suite.owns(environment))]
    return extras + [extra for kind, extra in GAME_EXTRAS.items() if environment.startswith(kind)]


def _use(name: str, environment: str, files: Sequence[str]) -> str:
    lines = [
        f"In a clone of evorl, with Python 3.11 or later (`evorl` on PyPI is another project): `pip install "
        f'".[{",".join(extras_of(environment))}]"`. Then',
        "",
        "```python",
        "import evorl",
        "",
        f'agent = evorl.load("{HUB}{name}")',
        "action, state = agent.predict(observation)",
        "```",
        "",
        f"and `evorl evaluate {HUB}{name}` plays 100 episodes; `evorl train population.from={HUB}{name}`, with the "
        "same algorithm and environment, trains the agent further.",
    ]
    if EXPORTED in files:
        lines += ["", f"`{EXPORTED}` does the same in any program that has onnxruntime."]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_plain(str(cell)) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Escape text for Markdown and HTML, on one line, truncated to 200 characters."""
    escaped = "".join(f"&#{ord(letter)};" if letter in "|<>&[]()!`*_#\\" else letter for letter in text[:200])
    return " ".join(escaped.split())


FILES = (ELITE_AGENT, ELITE_FACTS, METRICS, LINEAGE, SUMMARY, INTERFACE)
VIDEO = "replay.mp4"
OWNED = (*FILES, EXPORTED, RESULTS, VIDEO, PICTURE)
"""Files that a push deletes from the page if it no longer uploads them; all other files there are kept."""


def check_hub(*names: str) -> None:
    """Raise UserError unless these are valid Hub names, the `hub` extra is installed, and there is a token."""
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(f"{shown(name)}: is not a valid Hub name; use ME/NAME with letters, digits, -, _ and .")
    require("hub", "a push")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError("pushing needs a Hub token with write access; log in with `hf auth login`, or set HF_TOKEN")


def write_page(run: Path, folder: Path, name: str, video: Path | None, benchmark: str | None = None) -> list[str]:
    """Write the files of a run's model page `name` to an empty folder, and return their names.

    `benchmark` is a data set on the Hub whose leaderboard is to list the score. `evorl.load` can load the folder like a
    run. Settings listed in `tracking.exclude` are left out, and so is the picture without matplotlib. Raises UserError
    if there is no run, or it has no elite yet.
    """
    drawn = load(run)
    if not (run / FILES[0]).is_file():
        raise UserError(f"{run}: the run has no elite yet; its first generation has not ended")
    config = saved_config(drawn.config)
    settings = shared_settings(config)
    for file in (*FILES, *_exported(run)):
        if (run / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                (folder / file).write_bytes(read_bounded(run / file))
            except OSError as error:
                raise UserError(reason(error, run / file)) from error
    if benchmark is not None:
        (folder / RESULTS).parent.mkdir()
        results = yaml.safe_dump(evaluation_results(drawn, benchmark), sort_keys=False)
        (folder / RESULTS).write_text(results, encoding="utf-8")
    if video is not None:
        shutil.copyfile(video, folder / VIDEO)
    (folder / CONFIG).write_text(as_yaml(settings), encoding="utf-8")
    if not missing("plot"):
        draw([drawn], folder / PICTURE)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (folder / "README.md").write_text(card(drawn, settings, name, files), encoding="utf-8")
    return [*files, "README.md"]


def _exported(run: Path) -> Sequence[str]:
    """The exported agent of a run, if there is one; one older than the elite is left out with a warning."""
    if not (run / EXPORTED).is_file():
        return ()
    if (run / EXPORTED).stat().st_mtime >= (run / FILES[0]).stat().st_mtime:
        return (EXPORTED,)
    what = f"{run / EXPORTED}: is older than the best agent, so it is left out; `evorl export` writes a new one"
    warnings.warn(what, EvorlWarning, stacklevel=3)
    return ()


def push(folder: Path, name: str, private: bool) -> str:
    """Upload a folder to the model page `name`, created if missing, and return its URL. Raises UserError on failure."""
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        made = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message="Push an agent", delete_patterns=list(OWNED)
        )
    except Exception as error:  # Errors of its HTTP client differ from version to version.
        raise UserError(f"{name}: cannot be pushed: {message_of(error, 300)}") from error
    return str(made)
