"""Publishing a run's best agent as a model page on the Hugging Face Hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from evorl.algorithms import SETTINGS
from evorl.config import validate, without_removed
from evorl.export.card import PICTURE, card
from evorl.report.data import load
from evorl.report.picture import draw
from evorl.runs.directory import INTERFACE
from evorl.system.console import require
from evorl.system.files import read_bounded
from evorl.tracking.tracker import shared_settings
from evorl.types import UserError

FILES = ("elite/agent.safetensors", "elite/agent.json", "metrics.jsonl", "lineage.jsonl", "summary.json", INTERFACE)
OPTIONAL = ("agent.onnx",)


def check_hub() -> None:
    """Raise UserError unless the packages of the `hub` extra and a Hub token are available."""
    require("hub", ("huggingface_hub", "matplotlib"), "a push")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError("a push needs a key with which to write; log in with `hf auth login`, or set HF_TOKEN")


def write_page(run: Path, folder: Path, video: Path | None) -> list[str]:
    """Write the files of a run's model page to an empty folder, and return their names.

    `evorl.load` can load the folder like a run. Settings listed in `tracking.exclude` are left out. Raises UserError
    if there is no run, or it has no elite yet.
    """
    drawn = load(run)
    if not (run / FILES[0]).is_file():
        raise UserError(f"{run}: the run has no elite yet; its first generation has not ended")
    settings = shared_settings(validate(without_removed(drawn.config), SETTINGS))
    for name in (*FILES, *OPTIONAL):
        if (run / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_bounded(run / name))
    if video is not None:
        shutil.copyfile(video, folder / "replay.mp4")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
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
