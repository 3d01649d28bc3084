"""Runs on the Hugging Face Hub, named `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`, as directories to read."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evorl.config import AnyConfig
from evorl.config.fields import without
from evorl.runs.storage.directory import CONFIG, ELITE_AGENT, ELITE_FACTS, INTERFACE
from evorl.system.extras import require
from evorl.types.messages import message_of, shown
from evorl.types.outcomes import EvorlWarning, UserError

HUB = "hf:"
"""Prefix of the name of a run on the Hub."""
PAGE = re.compile(rf"{HUB}(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
FILES = (CONFIG, INTERFACE, ELITE_AGENT, ELITE_FACTS)
"""The files of a run's best agent."""


def is_on_hub(run: str | Path) -> bool:
    return str(run).startswith(HUB)


@contextlib.contextmanager
def local_run(run: str | Path) -> Iterator[Path]:
    """Yield the directory of a run: its own or, for a run on the Hub, a temporary one with the files needed.

    A page counts as a stranger's run, so the caller must validate its files. They are copied out of the Hub's cache,
    which consists of links, because links in a run are refused. A UserError raised in the block names the page, not
    the temporary directory.
    """
    if not is_on_hub(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory() as folder:
        _download(str(run), Path(folder))
        try:
            yield Path(folder)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(run))) from error


def warn_of_excluded(run: str | Path, data: Mapping[str, Any], config: AnyConfig) -> None:
    """Warn if a page lacks settings of its environment (`tracking.exclude`), which then has the defaults."""
    excluded = [key for key in config.tracking.exclude if without(data, [key]) == data]
    if lacking := [key for key in excluded if "environment" in key.split(".")[:2] or key == "evaluation"]:
        what = f"{run}: was published without {', '.join(lacking)}, so its environment has the defaults there"
        warnings.warn(what, EvorlWarning, stacklevel=2)


def _download(run: str, folder: Path) -> None:
    """Copy the files of a page that are read into an empty folder. Raises UserError."""
    page = PAGE.fullmatch(run)
    if page is None:
        raise UserError(f"{shown(run)}: a run on the Hub has the form {HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION")
    require("hub", run)
    import huggingface_hub

    try:
        cached = huggingface_hub.snapshot_download(
            page["name"], revision=page["revision"], allow_patterns=list(FILES), repo_type="model"
        )
        for name in FILES:
            source = Path(cached) / name
            if source.is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, folder / name)
    except Exception as error:  # Errors of its HTTP client differ from version to version.
        raise UserError(f"{run}: cannot be downloaded: {message_of(error, 300)}") from error
