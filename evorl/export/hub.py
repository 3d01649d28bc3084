"""Publishing a run's best agent as a model page on the Hugging Face Hub: its score, usage, lineage and settings."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evorl.algorithms import SETTINGS
from evorl.config import validate, without_removed
from evorl.report.data import Drawn, load
from evorl.report.facts import effect_rows, environment_facts, path_rows, run_facts, state
from evorl.report.picture import draw
from evorl.report.statistics import effects
from evorl.runs.directory import INTERFACE
from evorl.system.extras import missing, require
from evorl.system.files import read_bounded, reason
from evorl.tracking.tracker import shared_settings
from evorl.types import UserError

PICTURE = "lineage.png"


def card(run: Drawn, settings: Mapping[str, Any], files: Sequence[str]) -> str:
    """Return the model card of a run, in Markdown with the YAML metadata that the Hugging Face Hub reads.

    `settings` are the shareable settings, `files` the names of the other files on the page.
    """
    environment, algorithm = str(run.setting("environment.id")), str(run.setting("algorithm.name"))
    best = run.described_best
    parts = [
        f"---\n{yaml.safe_dump(_head(run, environment, algorithm), sort_keys=False)}---",
        f"# {_plain(algorithm)} on {_plain(environment)}",
        f"The best agent of a population, trained and evolved by evorl: a mean return of **{best}** "
        f"({_plain(state(run))}).",
    ]
    parts += [f'<video src="{name}" controls loop muted></video>' for name in files if name.endswith(".mp4")]
    parts += ["## Use", _use(files)]
    parts.append("## How it came about")
    parts += [f"![Returns of all agents, and the winner's path through them]({PICTURE})"] if PICTURE in files else []
    steps = [[row["generation"], row["agent"], row["fitness"], row["changed"]] for row in path_rows(run)]
    parts.append(_table(("generation", "agent", "fitness", "what changed"), [row for row in steps if row[3]][-30:]))
    found = effect_rows(effects(run))
    parts += [
        "## What mutations did",
        "Fitness of children less that of their parents, a generation before; compare with no mutation:",
    ]
    names = ("name", "count", "mean", "interval")
    parts.append(
        _table(("mutation", "children", "mean", "95 % interval"), [[row[name] for name in names] for row in found])
    )
    parts += ["## How it was made", _table(("", ""), [*run_facts(run), *environment_facts(run)])]
    shown = yaml.safe_dump(dict(settings), sort_keys=False).replace("```", "'''")
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
        metric = {"type": "mean_reward", "value": f"{last.elite_fitness:.2f} +/- {last.elite_std or 0:.2f}"}
        result = {"task": task, "dataset": {"name": environment, "type": environment}, "metrics": [metric]}
        head["model-index"] = [{"name": f"{algorithm}-{environment}", "results": [result]}]
    return head


def _use(files: Sequence[str]) -> str:
    lines = [
        "```python",
        "import evorl",
        "from huggingface_hub import snapshot_download",
        "",
        'agent = evorl.load(snapshot_download("NAME/OF-THIS-PAGE", local_dir="agent"))',
        "action, state = agent.predict(observation)",
        "```",
    ]
    if "agent.onnx" in files:
        lines += ["", "`agent.onnx` does the same in any program that has onnxruntime."]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_plain(str(cell)) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Escape text for Markdown and HTML, on one line, truncated to 200 characters."""
    escaped = "".join(f"&#{ord(letter)};" if letter in "|<>&[]()!`*_#\\" else letter for letter in text[:200])
    return " ".join(escaped.split())


FILES = ("elite/agent.safetensors", "elite/agent.json", "metrics.jsonl", "lineage.jsonl", "summary.json", INTERFACE)
OPTIONAL = ("agent.onnx",)


def check_hub() -> None:
    """Raise UserError unless the packages of the `hub` extra and a Hub token are available."""
    require("hub", "a push")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError("a push needs a key with which to write; log in with `hf auth login`, or set HF_TOKEN")


def write_page(run: Path, folder: Path, video: Path | None) -> list[str]:
    """Write the files of a run's model page to an empty folder, and return their names.

    `evorl.load` can load the folder like a run. Settings listed in `tracking.exclude` are left out, and the picture is
    if matplotlib is not installed. Raises UserError if there is no run, or it has no elite yet.
    """
    drawn = load(run)
    if not (run / FILES[0]).is_file():
        raise UserError(f"{run}: the run has no elite yet; its first generation has not ended")
    settings = shared_settings(validate(without_removed(drawn.config), SETTINGS))
    for name in (*FILES, *OPTIONAL):
        if (run / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            try:
                (folder / name).write_bytes(read_bounded(run / name))
            except OSError as error:
                raise UserError(reason(error, run / name)) from error
    if video is not None:
        shutil.copyfile(video, folder / "replay.mp4")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    if not missing("plot"):
        draw([drawn], folder / PICTURE, "best", None)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (folder / "README.md").write_text(card(drawn, settings, files))
    return [*files, "README.md"]


def push(folder: Path, name: str, private: bool) -> str:
    """Upload a folder to the model page `name`, created if missing, and return its URL. Raises UserError on failure."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = huggingface_hub.HfApi()
    try:
        made = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Push an agent")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(f"{name}: cannot be pushed: {' '.join(str(error).split())[:300]}") from error
    return str(made)
