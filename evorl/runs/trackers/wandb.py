"""Weights & Biases: curves over the environment steps of all agents, the lineage and the elite."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

import yaml

from evorl.config import AnyConfig
from evorl.runs.trackers.record import History, Points, Record, with_words
from evorl.runs.trackers.shared import shared_settings
from evorl.runs.trackers.wandb_charts import LINEAGE, MEANS, AgentTables, cell, charts
from evorl.system.files import read_bounded, write_json
from evorl.types import EvorlWarning, UserError

Mode = Literal["online", "offline", "disabled", "shared"]
SERVICE = "api.wandb.ai"
LOST = ("HandleAbandonedError", "MailboxClosedError")
"""Errors of W&B's own when its helper process ends while an answer is awaited."""
FORMERLY = ("forge.coreweave.com",)
"""Hosts that serve what was known as `SERVICE`."""
RUN_ID = re.compile(r"[a-z0-9]{1,64}")
INTERNALS = ("time/", "actors/")
"""What W&B opens no charts for, as for means over agents; it can be asked for them all the same."""
SHOWN = ("actors/staleness", "actors/queue_depth")


class WeightsAndBiases:
    """One W&B run for a run directory, whose steps are environment steps, however often the run is taken up again.

    Names are those that the field uses: `charts/episodic_return`, `losses/q_loss`. A chart of each quantity of agents
    has a line for each of them.

    Without a key it is an offline one, which `wandb sync` uploads later; it never asks. An offline run gets a directory
    from each process, and the newest holds the whole history, since uploading one replaces what was there.
    """

    def __init__(self, config: AnyConfig, directory: Path, history: History = ()) -> None:
        # Half a second that only programs which use it should pay.
        import wandb

        self._wandb = wandb
        self._settings = shared_settings(config)
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
            group=settings.group,
            job_type=settings.job_type,
            notes=settings.notes,
            config=self._settings,
            settings=wandb.Settings(
                console="wrap",
                silent=True,
                init_timeout=settings.timeout,
                finish_timeout=settings.timeout,
                finish_timeout_raises=True,
            ),
        )
        self._directory = directory
        self._tables = AgentTables()
        self._takes_tables = True
        self._defined: set[str] = set()
        self._run.define_metric("global_steps", hidden=True)
        # W&B may be ahead of the checkpoint; it keeps what it has of the generations that are re-run after resume.
        self._first = self._next = self._run.starting_step
        for record in history:
            self.log(record)

    def log(self, record: Record) -> None:
        with self._without_lost_service():
            self._log_record(record)

    def _log_record(self, record: Record) -> None:
        self._tables.add(record)
        if record.step < self._first:
            return
        points: dict[str, Any] = {self._name(name): value for name, value in record.points.items()}
        if record.agents and self._takes_tables and self._tables.are_due(record.generation):
            self._log_tables(record)
        self._log(record.step, points)

    def log_within(self, step: int, points: Points) -> None:
        if step < self._first:
            return
        with self._without_lost_service():
            self._log(step, {self._name(name): value for name, value in points.items()})

    def log_video(self, step: int, path: Path) -> None:
        if step < self._first:
            return
        with self._without_lost_service():
            self._log(step, {"video": self._wandb.Video(str(path))})

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        data = [[cell(row[column]) for column in LINEAGE] for row in map(with_words, lineage)]
        with self._without_lost_service():
            try:
                # In the summary, since a point of its own would take the step of a generation that may yet be run.
                self._run.summary["lineage"] = self._wandb.Table(columns=list(LINEAGE), data=data)
                self._run.summary.update(dict(summary))
                self._keep_elite()
            finally:
                self._run.finish()

    @contextlib.contextmanager
    def _without_lost_service(self) -> Iterator[None]:
        """Let go of W&B's helper process where it is lost: W&B itself would print a traceback when Python exits."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ConnectionError) or type(error).__name__ in LOST:
                with contextlib.suppress(Exception):
                    self._wandb.teardown()
            raise

    def _log_tables(self, record: Record) -> None:
        """Add tables and charts to what is logged next. This process sends them itself, so they may fail alone."""
        lineage = self._wandb.Table(columns=list(LINEAGE), data=self._tables.lineage())
        points = {"lineage": lineage, **charts(self._tables, record)}
        try:
            self._run.log(points, step=max(record.step, self._next), commit=False)
        except Exception as error:
            self._takes_tables = False
            what = f"W&B took no table of agents, and gets none from here on: {str(error)[:300]}"
            warnings.warn(what, EvorlWarning, stacklevel=2)

    def _log(self, step: int, points: Mapping[str, Any]) -> None:
        """Log points at a step beyond all others: those within a generation are at about the step that they tell."""
        self._run.log({**points, "global_steps": step}, step=max(step, self._next), commit=True)
        self._next = max(step, self._next) + 1

    def _name(self, name: str) -> str:
        """Return the key of a number of the population, which W&B has then heard of."""
        # The plain names of some belong to the charts of all agents.
        key = f"{name}_mean" if name.startswith(MEANS) else name
        hidden = name.startswith((*MEANS, *INTERNALS)) and name not in SHOWN
        if key not in self._defined:
            self._run.define_metric(key, step_metric="global_steps", hidden=hidden)
            self._defined.add(key)
        return key

    def _keep_elite(self) -> None:
        """Upload the best agent with its configuration."""
        elite = self._directory / "elite"
        if not elite.is_dir():
            return
        artifact = self._wandb.Artifact(f"{run_id(self._directory)}-elite", type="model")
        # `add_dir` would say so on the terminal.
        for path in sorted(elite.iterdir()):
            artifact.add_file(str(path))
        with artifact.new_file("config.yaml") as file:
            yaml.safe_dump(self._settings, file, sort_keys=False)
        self._run.log_artifact(artifact, aliases=["elite"])


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
    # An agent of a sweep waits for the run whose id it gave.
    given = os.environ.get("WANDB_RUN_ID", "") if os.environ.get("WANDB_SWEEP_ID") else ""
    drawn = given if RUN_ID.fullmatch(given) else secrets.token_hex(8)
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
