"""The logger of a run: metrics and lineage files, trackers, the progress bar and the summary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from signal import Signals
from typing import Any

from tqdm import tqdm

from evorl.config import AnyConfig
from evorl.runs.console import STOPPED, closing_lines, generation_line
from evorl.runs.curves import Use, perturbed, record_of
from evorl.runs.directory import RunDirectory
from evorl.runs.history import JsonLines
from evorl.runs.video import film_elite
from evorl.runs.within import Watched, Within
from evorl.system.console import Terminal, WarnOnce, say
from evorl.system.files import reason
from evorl.tracking import Record, Trackers
from evorl.types import EvorlWarning

Row = Mapping[str, Any]
MOST_LINES = 5_000
"""The number of newest lineage lines that trackers receive at the end."""


class Logger:
    """Writes and displays the results of each generation; only the main process has one.

    A failed write is reported once and retried with the next generation.
    """

    def __init__(
        self, config: AnyConfig, directory: RunDirectory, warn_once: WarnOnce, agent_steps: int, elite: bytes
    ) -> None:
        """Open the trackers and the progress bar at `agent_steps`; `elite` is the content of the elite's file."""
        self._config = config
        self._directory = directory
        self._warn_once = warn_once
        self._written_elite = elite
        self._varying = perturbed(config)
        self._trackers = Trackers(
            config, directory.path, _History(directory.metrics, self._varying, config.as_used, warn_once)
        )
        step = (directory.metrics.last() or {}).get("global_steps", 0)
        self._within = Within(config.tracking.interval, step if isinstance(step, int) else 0)
        self._bar: tqdm[Any] = tqdm(
            total=config.training.max_steps,
            initial=agent_steps,
            unit="step",
            desc=directory.path.name,
            dynamic_ncols=True,
            file=Terminal(),
            # Show one speed only, that of all agents. Without a terminal the lines of generations are enough.
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]",
            unit_scale=True,
            disable=not Terminal().isatty(),
        )
        newest = directory.lineage.newest(config.population.size)
        self._last_id = max((row["id"] for row in newest if isinstance(row.get("id"), int)), default=-1)
        self._phase = ""
        self._recent = ""
        self._speed = ""

    def advance(self, steps: int, watched: Watched | None) -> None:
        """Advance the bar by `steps` of each agent; every `tracking.interval` seconds also log points of `watched`."""
        self._reach(self._bar.n + steps)
        self._bar.update(steps)
        if watched is not None and (found := self._within.advance(steps * self._config.population.size, watched)):
            step, points = found
            self._trackers.log_within(step, points)
            # The speed of this generation: it may be the first, and may take minutes.
            self._speed = _speed(points["charts/SPS"])
            if "charts/episodic_return" in points:
                self._recent = f"return {points['charts/episodic_return']:.4g}"
            self._show()

    def enter(self, phase: str) -> None:
        """Show the current phase of the generation on the bar."""
        self._phase, self._recent = phase, ""
        self._show()

    def log(self, row: Row, lineage: Sequence[Row], elite: bytes) -> None:
        """Write a generation's lines, then the elite if it is new; then update the trackers and the bar."""
        self._directory.metrics.add([row])
        self._directory.lineage.add(lineage)
        is_new = False
        try:
            self._directory.flush()
            if elite != self._written_elite:
                self._directory.write_elite(elite)
                self._written_elite, is_new = elite, True
            self._warn_once.reset("lines")
        except OSError as error:
            self._warn_once(
                "lines", f"{reason(error, self._directory.path)}; training goes on, and this is tried again"
            )
        for agent in lineage:
            if agent["fault"]:
                what = f"agent {agent['id']} stopped learning in generation {row['generation']}: {agent['fault']}"
                warnings.warn(f"{what}; the next evolution replaces it", EvorlWarning, stacklevel=2)
        self._trackers.log(record_of(row, self._varying, self._config.as_used))
        if is_new and self._config.tracking.video:
            self._film(row)
        self._within.begin(row["global_steps"])
        born = [agent for agent in lineage if agent["id"] > self._last_id]
        self._last_id = max(self._last_id, *(agent["id"] for agent in lineage))
        self._reach(row["agent_steps"])
        self._bar.n = row["agent_steps"]
        self._speed = _speed(row["env_steps_per_second"])
        self._bar.clear()
        say(generation_line(row, born, self._config))
        self._bar.refresh()

    def _film(self, row: Row) -> None:
        """Record a video of the new elite for the trackers; a rendering error does not stop training."""
        try:
            path = film_elite(self._directory.path, row["generation"])
        except Exception as error:
            self._warn_once("film", f"tracking.video: no film of the best agent: {error}; training goes on")
        else:
            self._trackers.log_video(row["global_steps"], path)

    def close(self, summary: Row) -> str:
        """Write pending lines and the summary, and close the trackers; return the write error, empty on success.

        Closing lines are printed unless the run ended with an error, which is printed elsewhere.
        """
        problem = ""
        self._bar.close()
        try:
            self._directory.flush()
            self._directory.write_summary(summary)
        except OSError as error:
            problem = reason(error, self._directory.path)
        self._trackers.finish(summary, self._directory.lineage.newest(MOST_LINES))
        if summary["ended"] in ("finished", STOPPED, *Signals.__members__):
            has_elite = bool(self._written_elite)
            for line in closing_lines(summary, self._config, self._directory.path, has_elite=has_elite):
                say(line)
        return problem

    def _show(self) -> None:
        """Show the phase, the mean return of recent episodes, and the speed on the bar."""
        self._bar.set_postfix_str(", ".join(filter(None, (self._phase, self._recent, self._speed))))

    def _reach(self, steps: float) -> None:
        """Grow the bar's total to `steps`: the last generation may end beyond `training.max_steps`."""
        self._bar.total = max(self._bar.total or 0.0, steps)


class _History:
    """Tracker records of the generations before this process, read from the file on each iteration."""

    def __init__(self, metrics: JsonLines, varying: frozenset[str], use: Use, warn_once: WarnOnce) -> None:
        self._metrics = metrics
        self._varying = varying
        self._use = use
        self._warn_once = warn_once

    def __iter__(self) -> Iterator[Record]:
        try:
            for row in self._metrics.rows():
                yield record_of(row, self._varying, self._use)
        except Exception as error:  # The file may have been edited, so any error is possible.
            self._warn_once("history", f"{self._metrics.path}: a line was changed or damaged: {error!r}")


def _speed(steps_per_second: float) -> str:
    """Format the speed for the progress bar."""
    return f"{steps_per_second:,.0f} steps/s of all agents"
