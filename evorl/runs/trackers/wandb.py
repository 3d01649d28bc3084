"""Weights & Biases: curves over the environment steps of all agents, and the lineage as a table."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

from evorl.config import AnyConfig
from evorl.runs.trackers.history import History, Points, lacking, with_words
from evorl.runs.trackers.shared import shared_settings
from evorl.system.files import read_bounded, write_json
from evorl.types import EvorlWarning, UserError

LINEAGE_COLUMNS = ("generation", "id", "parent", "mutation", "fitness", "architectures", "hyperparameters")
Mode = Literal["online", "offline", "disabled", "shared"]
SERVICE = "api.wandb.ai"
FORMERLY = ("forge.coreweave.com",)
"""Hosts that serve what was known as `SERVICE`."""
RUN_ID = re.compile(r"[a-z0-9]{1,64}")


class WeightsAndBiases:
    """One W&B run for a run directory, whose steps are generations, however often the run is taken up again.

    Without a key it is an offline one, which `wandb sync` uploads later; it never asks. An offline run gets a directory
    from each process, and the newest holds the whole history, since uploading one replaces what was there.
    """

    def __init__(self, config: AnyConfig, directory: Path, history: History = ()) -> None:
        # Half a second that only programs which use it should pay.
        import wandb

        self._wandb = wandb
        # W&B obeys a `wandb/settings` in the working directory, which may be that of a stranger's run: the host named
        # there would be sent the user's key. What `wandb login` and the environment say is read all the same.
        with contextlib.chdir(Path.cwd().anchor):
            address = str(wandb.setup().settings.base_url)
        settings = config.tracking
        mode = _mode(settings.mode, address)
        if mode == "offline" and settings.mode == "auto" and not os.environ.get("WANDB_MODE"):
            newest = directory / "wandb" / "latest-run"
            print(f"W&B: no key found, so the run is recorded offline; upload it with `wandb sync {newest}`")
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=directory.name,
            id=run_id(directory),
            # An offline run with such metrics would be appended to what an earlier upload left, and that doubled.
            resume=None if mode == "offline" else "allow",
            # W&B's helper process keeps the working directory of the program's first run.
            dir=str(directory.resolve()),
            mode=mode,
            tags=list(settings.tags),
            config=shared_settings(config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=settings.timeout,
                finish_timeout=settings.timeout,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("global_steps")
        self._run.define_metric("*", step_metric="global_steps")
        self._first = self._run.starting_step
        for entry in lacking(history, self._first):
            self.log(*entry)

    def log(self, generation: int, step: int, scalars: Points) -> None:
        # W&B may be ahead of the checkpoint; it keeps what it has of the generations that are re-run after resume.
        if generation >= self._first:
            self._run.log({**scalars, "global_steps": step}, step=generation, commit=True)

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        data = [[_cell(row[column]) for column in LINEAGE_COLUMNS] for row in map(with_words, lineage)]
        try:
            # In the summary, since a point of its own would take the step of a generation that may yet be run.
            self._run.summary["lineage"] = self._wandb.Table(columns=list(LINEAGE_COLUMNS), data=data)
            self._run.summary.update(dict(summary))
        finally:
            self._run.finish()


def run_id(directory: Path) -> str:
    """Return the W&B id of the run in `directory`: drawn once, and kept in its `tracking.json`."""
    path = directory / "tracking.json"
    try:
        kept = json.loads(read_bounded(path))["wandb"]
        if RUN_ID.fullmatch(kept):
            return str(kept)
        reason = "its id is not one to 64 small letters and digits"
    except FileNotFoundError:
        reason = None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        reason = f"it holds no id ({type(error).__name__})"
    if reason:
        warnings.warn(f"{path}: {reason}; W&B gets a new run, with the whole history", EvorlWarning, stacklevel=2)
    drawn = secrets.token_hex(8)
    write_json(path, {"wandb": drawn})
    return drawn


def _mode(asked: Literal["auto", "online", "offline"], address: str) -> Mode:
    """Return the mode of W&B: what is asked for, else W&B's own variable, else online where there is a key."""
    if asked != "auto":
        return asked
    variable = os.environ.get("WANDB_MODE")
    if variable:
        return "offline" if variable == "dryrun" else cast("Mode", variable)  # W&B refuses what it does not know.
    return "online" if _has_key(address) else "offline"


def _has_key(address: str) -> bool:
    """Return whether W&B could log in without asking: from the environment, or from what `wandb login` wrote."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(address).hostname or ""
    # W&B's own service has another address since version 0.31, where a key for the old one is valid too.
    hosts = [host, SERVICE] if host.removeprefix("api.") in FORMERLY else [host]
    try:
        kept = netrc.netrc(os.environ.get("NETRC"))
        return any(kept.authenticators(name) is not None for name in hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def _cell(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return ", ".join(f"{key}=({_cell(v)})" if isinstance(v, Mapping) else f"{key}={v}" for key, v in value.items())
