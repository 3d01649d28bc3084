"""Publishing a run's best agent on the Hugging Face Hub: its files and a model card."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.config import AnyConfig, validate
from evorl.config.fields import without
from evorl.config.schema import as_yaml
from evorl.report.data import Drawn, load
from evorl.report.picture import draw
from evorl.runs.reading.hub import HUB
from evorl.runs.storage.directory import (
    CONFIG,
    ELITE_AGENT,
    ELITE_FACTS,
    EXPORTED,
    INTERFACE,
    LINEAGE,
    METRICS,
    SUMMARY,
)
from evorl.runs.storage.trust import is_run
from evorl.system.extras import missing, require
from evorl.system.files import file_errors, read_bytes, read_object, write_json
from evorl.tracking.tracker import shared_settings
from evorl.types.messages import message_of, shown
from evorl.types.outcomes import EvorlWarning, UserError

PICTURE = "lineage.png"
NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""The name of a page."""
PERSONAL = (
    "run",
    *(f"population.{name}" for name in ("from", "hyperparameters")),
    *(f"tracking.{name}" for name in ("backends", "project", "video")),
)
"""Settings that say where and for whom the run was trained."""


def card(run: Drawn, settings: Mapping[str, Any], name: str, files: Sequence[str]) -> str:
    """The model card of the page `name`, in Markdown: the score as metadata, how to load the agent, and its settings.

    `settings` are those that somebody else can train with, `files` the names of the other files on the page.
    """
    import huggingface_hub

    environment, algorithm = str(run.setting("environment.id")), str(run.setting("algorithm.name"))
    last, results = run.generations[-1], []
    if last.elite_fitness is not None:
        # By convention +/- is the standard deviation of returns here: the Hub's leaderboards rank by it.
        spread = "" if last.elite_std is None else f" +/- {last.elite_std:.2f}"
        result = huggingface_hub.EvalResult(
            task_type="reinforcement-learning",
            dataset_type=environment,
            dataset_name=environment,
            metric_type="mean_reward" if run.score_name == "mean return" else run.score_name.replace(" ", "_"),
            metric_value=f"{last.elite_fitness:.2f}{spread}",
        )
        results.append(result)
    head = huggingface_hub.ModelCardData(
        library_name="evorl",
        tags=["reinforcement-learning", "deep-reinforcement-learning", "evolution", algorithm, environment],
        model_name=f"{algorithm}-{environment}",
        eval_results=results or None,
    )
    videos = [f'<video src="{file}" controls loop muted></video>\n' for file in files if file.endswith(".mp4")]
    picture = f"![Fitness of all agents, and the winner's path through them]({PICTURE})\n" if PICTURE in files else ""
    exported = f"`{EXPORTED}` does the same in any program that has onnxruntime.\n" if EXPORTED in files else ""
    return f"""---
{head.to_yaml()}
---

# {_escaped(algorithm)} on {_escaped(environment)}

The best agent of a population, trained and evolved by evorl: a {_escaped(run.score_name)} of
**{run.described_best}**.

{"".join(videos)}
In a clone of evorl (`evorl` on PyPI is another project), after `pip install -e ".[hub]"`:

```python
import evorl

agent = evorl.load("{HUB}{name}")
action, state = agent.predict(observation)
```

`evorl evaluate {HUB}{name}` plays 100 episodes. With the configuration below as `config.yaml`,
`evorl train config.yaml population.from={HUB}{name}` trains it further.
{exported}
{picture}
```yaml
{as_yaml(settings).replace("```", "'''")}```
"""


def _escaped(text: str) -> str:
    """Text for one line of Markdown and HTML, truncated to 200 characters."""
    return "".join(f"&#{ord(letter)};" if letter in "|<>&[]()!`*_#\\\n" else letter for letter in text[:200])


FILES = (ELITE_AGENT, ELITE_FACTS, METRICS, LINEAGE, SUMMARY, INTERFACE)
VIDEO = "replay.mp4"
OWNED = (*FILES, EXPORTED, VIDEO, PICTURE)
"""Files that a push deletes from the page if it no longer uploads them; all other files there are kept."""


def check_hub(name: str) -> None:
    """Raise UserError unless this is a valid Hub name, the `hub` extra is installed, and there is a token."""
    if not NAME.fullmatch(name):
        raise UserError(f"{shown(name)}: is not a valid Hub name; use ME/NAME with letters, digits, -, _ and .")
    require("hub", "a push")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError("pushing needs a Hub token with write access; log in with `hf auth login`, or set HF_TOKEN")


def write_page(run: Path, folder: Path, name: str, video: Path | None) -> list[str]:
    """Write the files of a run's model page `name` to an empty folder, and return their names.

    `evorl.load` can load the folder like a run. `PERSONAL` settings and those listed in `tracking.exclude` are left
    out, and so is the picture without matplotlib. Raises UserError if there is no run, or it has no elite yet.
    """
    drawn = load(run)
    if not (run / FILES[0]).is_file():
        raise UserError(f"{run}: the run has no elite yet; its first generation has not ended")
    settings = _published(validate(drawn.config))
    for file in (*FILES, *_exported(run)):
        if (run / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            with file_errors(run / file):
                (folder / file).write_bytes(read_bytes(run / file))
    if (folder / SUMMARY).is_file():
        # The reason of an end may quote code and name files.
        write_json(folder / SUMMARY, read_object(folder / SUMMARY) | {"because": None})
    if video is not None:
        shutil.copyfile(video, folder / VIDEO)
    (folder / CONFIG).write_text(as_yaml(settings), encoding="utf-8")
    if not missing("plot"):
        draw([drawn], folder / PICTURE)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (folder / "README.md").write_text(card(drawn, without(settings, ["tracking"]), name, files), encoding="utf-8")
    return [*files, "README.md"]


def _published(config: AnyConfig) -> dict[str, Any]:
    """The settings on a page; of a run that is the benchmark, the name without the path."""
    if config.league is not None and is_run(config.league.benchmark):
        league = config.league.model_copy(update={"benchmark": Path(config.league.benchmark).name})
        config = config.model_copy(update={"league": league})
    # Readers of a page look up in `tracking.exclude` what it lacks.
    return without(shared_settings(config), PERSONAL)


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
