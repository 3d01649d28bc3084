"""Weights & Biases: curves over the environment steps of all agents, the lineage and the elite.

W&B's standard charts draw one line per run, so charts of all agents, with one line per agent, are custom charts. All of
them read one table, whose rows are the living agents and their ancestors: each line is the lineage of an agent,
labelled with its id and its last mutation.
"""

from __future__ import annotations

import contextlib
import math
import netrc
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

from evorl.config import AnyConfig
from evorl.config.schema import as_yaml
from evorl.tracking.tracker import (
    TRACKER_PATIENCE,
    History,
    Node,
    Paths,
    Points,
    Record,
    Tracker,
    run_id,
    shared_settings,
    thinned,
    with_words,
)
from evorl.types.agents import UNCHANGED
from evorl.types.messages import shown
from evorl.types.outcomes import FINISHED, STOPPED

Mode = Literal["online", "offline", "disabled", "shared"]
SERVICE = "api.wandb.ai"
FORMERLY = ("forge.coreweave.com",)
"""New hosts of the service formerly at `SERVICE`."""
INTERNALS = ("time/", "actors/")
"""Metrics hidden by default in W&B, like means over agents; charts of them can be added by hand."""
SHOWN = ("actors/staleness", "actors/queue_depth")
TABLE = "agents"
SPECIFICATION = "wandb/lineseries/v0"
OWN = ("global_steps", "line", "generation", "agent", "mutation")
MEANS = ("losses/", "hyperparameters/", "architecture/")
"""Metrics whose means over agents are hidden, since there are charts of all agents."""
MOST_ROWS = 2_000
"""The maximum number of rows of a table, and so of points in a chart over all lines."""
EACH = 50
"""Up to this generation tables are uploaded every time; later only if the generation is 5 % beyond the last upload."""

LINEAGE = ("generation", "id", "parent", "mutation", "fitness", "architectures", "hyperparameters")


class WeightsAndBiases(Tracker):
    """One W&B run per run directory, over environment steps, however often the run is resumed.

    Metrics have standard names such as `charts/episodic_return` and `losses/q_loss`. Each metric of agents has a chart
    with one line per agent.

    Without an API key the run is offline and can be uploaded later with `wandb sync`; there is never a prompt. Each
    process writes its own offline directory, and the newest contains the whole history, since uploading one replaces
    what was there.
    """

    def __init__(self, config: AnyConfig, directory: Path, history: History = ()) -> None:
        # Imported late: it takes half a second.
        import wandb

        self._wandb = wandb
        self._config = config
        self._settings = shared_settings(config)
        mode = _mode(_address())
        newest = shlex.quote(str(directory / "wandb" / "latest-run"))
        upload = f"so the run is recorded offline; upload it with `wandb sync {newest}`"
        if mode == "offline" and not os.environ.get("WANDB_MODE"):
            print(f"W&B: no key found, {upload}")
        try:
            self._run = self._begun(directory, mode)
        except wandb.errors.CommError:
            if mode != "online":
                raise
            # Compute nodes of clusters often have a key, but no internet access.
            print(f"W&B: no connection to {_address()}, {upload}")
            # Its helper process still holds the run by this id.
            wandb.teardown()
            self._run = self._begun(directory, "offline")
        self._directory = directory
        self._paths = Paths()
        self._charted = 0
        self._living: Sequence[Node] = ()
        self._defined: set[str] = set()
        for name in ("global_steps", "generation"):
            self._run.define_metric(name, hidden=True)
        # W&B may be ahead of the checkpoint; it keeps its points of the generations that are trained again.
        self._first = self._next = self._run.starting_step
        # Points within a generation may lie beyond its end, since steps that only reset an environment count in them.
        self._recorded = self._run.summary.get("generation", math.inf)
        for record in history:
            self.log(record)

    def _begun(self, directory: Path, mode: Mode) -> Any:
        """Begin or continue W&B's run. Raises wandb.errors.CommError if it does not answer within the time limit."""
        settings = self._config.tracking
        return self._wandb.init(
            project=settings.project,
            name=directory.name,
            id=run_id(directory),
            # Resuming an offline run would append to an earlier upload and duplicate its history.
            resume=None if mode == "offline" else "allow",
            # Absolute, since W&B's helper process keeps the working directory of the program's first run.
            dir=str(directory.resolve()),
            mode=mode,
            config=self._settings,
            settings=self._wandb.Settings(
                console="wrap",
                silent=True,
                init_timeout=TRACKER_PATIENCE,
                finish_timeout=TRACKER_PATIENCE,
                finish_timeout_raises=True,
                # Its metadata has the arguments of the command line, and so the settings that are to be left out.
                x_disable_meta=bool(settings.exclude),
            ),
        )

    def log(self, record: Record) -> None:
        self._living = self._paths.add(record)
        if record.step < self._first and record.generation <= self._recorded:
            return
        points: dict[str, Any] = {self._name(name): value for name, value in record.points.items()}
        if self._living and self._are_due(record.generation):
            self._run.log(charts(self._living, record.points), step=max(record.step, self._next), commit=False)
        self._log(record.step, {**points, "generation": record.generation})

    def log_within(self, step: int, points: Points) -> None:
        if step >= self._first:
            self._log(step, {self._name(name): value for name, value in points.items()})

    def log_video(self, step: int, path: Path) -> None:
        if step >= self._first:
            self._log(step, {"video": self._wandb.Video(str(path))})

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        data = [[cell(row[column]) for column in LINEAGE] for row in map(with_words, lineage)]
        try:
            # Use the summary: logging a point would consume the step of a generation that may still be trained.
            if Path(self._run.dir).is_dir():  # A table would make it anew, also where a run was moved away.
                self._run.summary["lineage"] = self._wandb.Table(columns=list(LINEAGE), data=data)
                if self._living:  # Charts show the newest upload, which may be some generations old.
                    self._run.summary[TABLE] = table(self._living)
            self._run.summary.update(dict(summary))
            self._keep_elite()
        finally:
            # Without the code W&B would show a run that failed or was interrupted as finished.
            self._run.finish(exit_code=int(summary.get("ended", FINISHED) not in (FINISHED, STOPPED)))

    def _are_due(self, generation: int) -> bool:
        """True if this generation uploads charts: uploading every time would cost quadratically many rows."""
        due = generation <= EACH or generation >= 1.05 * self._charted
        self._charted = generation if due else self._charted
        return due

    def _log(self, step: int, points: Mapping[str, Any]) -> None:
        """Log points at a W&B step beyond all others, so that points within a generation may be shifted slightly."""
        self._run.log({**points, "global_steps": step}, step=max(step, self._next), commit=True)
        self._next = max(step, self._next) + 1

    def _name(self, name: str) -> str:
        # The plain names of these metrics are used by the charts of all agents.
        key = f"{name}_mean" if name.startswith(MEANS) else name
        hidden = name.startswith((*MEANS, *INTERNALS)) and name not in SHOWN
        if key not in self._defined:
            self._run.define_metric(key, step_metric="global_steps", hidden=hidden)
            self._defined.add(key)
        return key

    def _keep_elite(self) -> None:
        elite = self._directory / "elite"
        if not elite.is_dir():
            return
        artifact = self._wandb.Artifact(f"{run_id(self._directory)}-elite", type="model")
        # `add_dir` would print to the terminal.
        for path in sorted(elite.iterdir()):
            artifact.add_file(str(path))
        with artifact.new_file("config.yaml") as file:
            file.write(as_yaml(self._settings))
        self._run.log_artifact(artifact, aliases=["elite"])


def sent_to_wandb(config: AnyConfig) -> str:
    """Return one line on what W&B is sent, where to, and how not to; empty if nothing leaves the machine."""
    address = _address()
    if _mode(address) in ("offline", "disabled"):
        return ""
    whose, host = os.environ.get("WANDB_ENTITY"), urlparse(address).hostname or address
    project = f"{whose}/{config.tracking.project}" if whose else config.tracking.project
    return (
        f"W&B: settings, metrics, lineage, printed lines and the best agent go to the project {shown(project)} at "
        f"{host}; `--no-track` (tracking.backends=[]) sends nothing, WANDB_MODE=offline keeps them here"
    )


def _address() -> str:
    import wandb

    # W&B reads `wandb/settings` in the working directory, which may be an untrusted run: it would send the user's
    # key to the host named there. Settings of `wandb login` and of the environment still apply.
    with contextlib.chdir(Path.cwd().anchor):
        return str(wandb.setup().settings.base_url)


def _mode(address: str) -> Mode:
    """Return the W&B mode: WANDB_MODE, or else online if there is an API key."""
    variable = os.environ.get("WANDB_MODE")
    if variable:
        return "offline" if variable == "dryrun" else cast("Mode", variable)  # W&B rejects unknown modes.
    return "online" if _has_key(address) else "offline"


def _has_key(address: str) -> bool:
    """Return True if W&B can log in without a prompt, from the environment or from `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(address).hostname or ""
    # W&B's own service has a new address since version 0.31, where a key for the old one is also valid.
    hosts = [host, SERVICE] if host.removeprefix("api.") in FORMERLY else [host]
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
        return any(logins.authenticators(name) is not None for name in hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def curves(living: Sequence[Node]) -> tuple[list[str | int], list[list[Any]]]:
    """The column names and the rows of the curves of the agents that live, from their first ancestors on."""
    most = max(2, MOST_ROWS // max(1, len(living)))
    lines = {_label(path): thinned(path, most) for path in (node.path() for node in living)}
    names = list({name: None for path in lines.values() for node in path for name in node.agent.points})
    rows = [
        [node.step, label, node.generation, node.agent.id, node.agent.mutation]
        + [node.agent.points.get(name) for name in names]
        for label, path in lines.items()
        for node in path
    ]
    return [*OWN, *names], rows


def table(living: Sequence[Node]) -> Any:
    """The table that the charts of all agents read."""
    import wandb

    columns, rows = curves(living)
    return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)


def charts(living: Sequence[Node], means: Points) -> dict[str, Any]:
    """One chart per metric of the agents that live, by W&B key; those of `means` have a chart of the mean, too."""
    from wandb.plot.custom_chart import CustomChart, CustomChartSpec

    class OfOneTable(CustomChartSpec):
        """A custom chart that reads the table shared by all charts."""

        @property
        def table_key(self) -> str:
            return TABLE

    data, by_key = table(living), {}
    for name in dict.fromkeys(name for node in living for name in node.agent.points):
        fields = {"step": "global_steps", "lineKey": "line", "lineVal": name}
        words = {"title": name.rpartition("/")[2].replace("_", " "), "xname": "environment steps of all agents"}
        shown = name in means and not name.startswith(MEANS)
        by_key[f"{name}_by_agent" if shown else name] = CustomChart(data, OfOneTable(SPECIFICATION, fields, words))
    return by_key


def cell(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return ", ".join(f"{key}=({cell(v)})" if isinstance(v, Mapping) else f"{key}={v}" for key, v in value.items())


def _label(path: Sequence[Node]) -> str:
    # What follows a kind in brackets may be where an agent is from, as in "initial (agent 3 of runs/a)".
    changed = (node.agent for node in reversed(path) if node.agent.mutation.partition(" (")[0] not in UNCHANGED)
    last = next(changed, None)
    return f"#{path[-1].agent.id}" + (f" {last.mutation}" if last else "")
