"""Trackio: curves of the population in a local database, or on a Hugging Face Space, and the lineage as text."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.config import AnyConfig
from evorl.tracking.tracker import History, Points, Record, Tracker, lineage_table, run_id, shared_settings
from evorl.types.messages import shown

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables that make Trackio log to a Space or a server instead of this machine; the first one set counts."""


class Trackio(Tracker):
    """One Trackio run per run directory, over environment steps.

    Local by default: the database is in `TRACKIO_DIR`, and `trackio show` opens it. A resumed run rewrites its local
    curves from its whole history; on a Space or a server they continue, and keep the old points of generations that are
    trained again.
    """

    def __init__(self, config: AnyConfig, directory: Path, history: History = ()) -> None:
        # Imported late: it takes seconds.
        import trackio

        self._trackio = trackio
        project, is_remote = config.tracking.project, _place() is not None
        # Runs are known by their names, and directories of different folders may have the same one.
        name = f"{directory.name}-{run_id(directory)[:8]}"
        if not is_remote:
            # Trackio raises ValueError for a project that has no runs yet.
            with contextlib.suppress(ValueError):
                for earlier in [run for run in trackio.Api().runs(project) if run.name == name]:
                    earlier.delete()
        with _quietly():
            self._run = trackio.init(
                project=project,
                name=name,
                config=shared_settings(config),
                resume="allow" if is_remote else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        # Otherwise Trackio would finish its current run, and print that, a second time when Python exits.
        trackio.context_vars.current_run.set(None)
        if not is_remote:
            print(f"Trackio: recorded on this machine; see it with `trackio show --project {project}`")
        self._step = 0
        for record in history:
            self._step = record.step
            if not is_remote:
                self.log(record)

    def log(self, record: Record) -> None:
        self._log(record.step, record.points)

    def log_within(self, step: int, points: Points) -> None:
        self._log(step, points)

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        ends = "\n".join(f"- {key}: {value}" for key, value in summary.items())
        texts = {"lineage": lineage_table(lineage), "summary": ends}
        self._run.log({name: self._trackio.Markdown(text) for name, text in texts.items()}, step=self._step)
        with _quietly():
            self._run.finish()

    def _log(self, step: int, points: Points) -> None:
        self._step = step
        self._run.log(dict(points), step=step)


def sent_to_trackio(config: AnyConfig) -> str:
    """Return one line on what Trackio sends, where to, and how not to; empty if nothing leaves the machine."""
    target = _place()
    if target is None:
        return ""
    variable, value = target
    return (
        f"Trackio: settings, metrics and lineage go to the project {shown(config.tracking.project)} at {shown(value)} "
        f"({variable}); `--no-track` (tracking.backends=[]) sends nothing"
    )


def _place() -> tuple[str, str] | None:
    """Return the variable that names another machine to log to, and its value without a token, or None."""
    target = next(((name, value) for name in REMOTE if (value := os.environ.get(name))), None)
    return None if target is None else (target[0], target[1].partition("?")[0])


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield
