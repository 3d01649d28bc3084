"""The logger of a run: its files, trackers, progress bar and terminal lines. Axes: P agents, N episodes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from signal import Signals
from typing import Any

from tqdm import tqdm

from evorl.config import AnyConfig
from evorl.envs.generation import GenerationPlan
from evorl.envs.json_spaces import interface_to_json
from evorl.envs.spaces import EnvSpec
from evorl.runs.agents.fitness import Fitness
from evorl.runs.output.callbacks import LOGGED, Callback, Stop, call_each
from evorl.runs.output.console import closing_lines, generation_line, progress_line
from evorl.runs.output.metrics import (
    Counts,
    PointsWithin,
    RecentEpisodes,
    generation_row,
    island_of,
    record_of,
)
from evorl.runs.output.video import film_elite
from evorl.runs.storage.directory import INTERFACE, SUMMARY, RunDirectory
from evorl.runs.storage.json_lines import JsonLines
from evorl.runs.storage.progress import Progress
from evorl.system.console import Terminal, WarnOnce, say, speed
from evorl.system.files import reason
from evorl.tracking.tracker import Record
from evorl.tracking.trackers import Trackers
from evorl.types.agents import Agent
from evorl.types.outcomes import FINISHED, STOPPED, EvorlWarning, RunFailed

Row = Mapping[str, Any]
EVALUATION = "evaluation"
LOOKS = 3
"""Without a progress bar, every third point of the trackers within a generation is a line, too."""
MOST_LINES = 5_000
"""The number of newest lineage lines that trackers receive at the end."""


class Logger:
    """Writes and displays the results of each generation; only the main process has one.

    A failed write is reported once and retried with the next generation.
    """

    def __init__(
        self,
        config: AnyConfig,
        directory: RunDirectory,
        length: GenerationPlan,
        interface: EnvSpec,
        warn_once: WarnOnce,
        callbacks: Sequence[Callback],
        progress: Progress,
    ) -> None:
        """Open the trackers and the progress bar where the run's `progress` is; its elite is in the elite's file."""
        self._config = config
        self._directory = directory
        self._length = length
        self._warn_once = warn_once
        self._callbacks = callbacks
        self._elite = self._written_elite = progress.elite.payload
        try:
            directory.write(INTERFACE, interface_to_json(interface))
        except OSError as error:
            warn_once("interface", f"{reason(error, directory.path)}; training goes on")
        # The file is read before the trackers start, which a failure would leave running.
        newest = (row.get("id") for row in directory.lineage.newest(config.population.agents))
        self._last_id = max((id for id in newest if isinstance(id, int)), default=-1)
        self._trackers = Trackers(config, directory.path, _History(config, directory.metrics, warn_once))
        self._within = PointsWithin(progress.global_steps)
        self._bar: tqdm[Any] = tqdm(
            total=config.training.max_steps,
            initial=progress.agent_steps,
            unit="step",
            desc=directory.path.name,
            dynamic_ncols=True,
            file=Terminal(),
            # Show one speed only, that of all agents. Without a terminal there are lines instead.
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]",
            unit_scale=True,
            disable=not Terminal().isatty(),
        )
        self._generation = self._done = self._total = self._looks = 0
        self._phase = ""
        self._recent = ""
        self._speed = ""

    def begin(self, generation: int, done: int, total: int) -> None:
        """Show that a generation of `total` steps of each agent begins, or goes on after `done` of them."""
        self._move_bar(done)
        self._within.skip(done * self._config.population.agents)
        self._generation, self._done, self._total, self._looks = generation, done, total, 0
        self.enter("training")

    def enter(self, phase: str) -> None:
        """Show the current phase of the generation."""
        self._phase, self._recent = phase, ""
        self._show()
        if phase == EVALUATION and self._looks >= LOOKS and self._bar.disable:
            self._tell(f"gen {self._generation} | evaluation")

    def advance(self, steps: int, recent: RecentEpisodes | None) -> None:
        """Show `steps` more of each agent; every `INTERVAL` seconds also log means from `recent`."""
        self._move_bar(steps)
        self._done += steps
        agents = self._config.population.agents
        if recent is None or (due := self._within.advance(steps * agents, recent)) is None:
            return
        step, points = due
        self._trackers.log_within(step, points)
        # The speed of this generation: it may be the first, and may take minutes.
        rate = points["charts/SPS"]
        self._speed = speed(rate)
        if "charts/episodic_return" in points:
            self._recent = f"return {points['charts/episodic_return']:.4g}"
        self._show()
        self._looks += 1
        if self._bar.disable and self._looks % LOOKS == 0:
            self._tell(progress_line(self._generation, self._done, self._total, agents, rate, self._recent))

    def record(
        self,
        agents: list[Agent],
        fitness: Fitness,
        counts: Counts,
        progress: Progress,
        seconds: Mapping[str, float],
        actors: Mapping[str, float] | None,
    ) -> Stop | None:
        """Log a finished generation with the `fitness` of its agents; return the Stop of a callback, or None."""
        # Only steps that reset an environment are not counted. If no episode ended there are none, so a lower count
        # means that the generation was cut short.
        planned = self._length.steps * self._length.agent_steps_per_vector_step
        if not counts.ended_episodes.any() and counts.steps.mean() >= planned:
            self._warn_once(
                "episodes",
                f"no episode ended in generation {progress.generation}, which had "
                f"{self._length.steps_of_each_environment:,} steps of each environment, so train_return is empty",
            )
        if warning := self._config.algorithm.warning(counts.metrics, counts.train_return):
            self._warn_once("metrics", f"{warning} (generation {progress.generation})")
        left_out = ("elite", "islands", "pairs", "league", "benchmark", "evaluation_steps", "position")
        numbers = {name: value for name, value in asdict(progress).items() if name not in left_out}
        numbers |= {"selection_began": progress.selection_began, "rank_correlation": progress.rank_correlation}
        row = generation_row(agents, fitness, counts, numbers, progress.elite, seconds, self._config)
        row |= {} if actors is None else {"actors": dict(actors)}
        logged, stop = call_each(self._callbacks, row, agents)
        row |= {LOGGED: logged} if logged else {}
        lineage = [
            {"generation": progress.generation, **island_of(place, self._config), **agent.describe()}
            for place, agent in enumerate(agents)
        ]
        self._log(row, lineage, progress.elite.payload)
        self.enter("evolution")
        return stop

    def close(self, summary: Row) -> str:
        """Write pending lines and the summary, and close the trackers; return the write error, empty on success.

        Closing lines are printed unless the run ended with an error, which is printed elsewhere.
        """
        problem = ""
        lineage: Sequence[Row] = ()
        self._bar.close()
        try:
            self._directory.flush()
            self._write_elite()
            self._directory.write(SUMMARY, summary)
            lineage = self._directory.lineage.newest(MOST_LINES)
        except OSError as error:
            problem = reason(error, self._directory.path)
        except RunFailed as error:
            problem = str(error)
        # After a signal, a tracker that takes too long to close ends the process by force.
        if summary["ended"] in (FINISHED, STOPPED, *Signals.__members__):
            has_elite = bool(self._written_elite)
            for line in closing_lines(summary, self._config, self._directory.path, has_elite=has_elite):
                say(line)
        self._trackers.finish(summary, lineage)
        return problem

    def _log(self, row: Row, lineage: Sequence[Row], elite: bytes) -> None:
        """Write a generation's lines, then the elite if it is new; then update the trackers and the bar."""
        self._directory.metrics.add([row])
        self._directory.lineage.add(lineage)
        self._elite, is_new = elite, False
        try:
            self._directory.flush()
            is_new = self._write_elite()
            self._warn_once.reset("lines")
        except OSError as error:
            self._warn_once(
                "lines", f"{reason(error, self._directory.path)}; training continues, and the write will be retried"
            )
        for agent in lineage:
            if agent["fault"]:
                what = f"agent {agent['id']} stopped learning in generation {row['generation']}: {agent['fault']}"
                warnings.warn(f"{what}; the next evolution replaces it", EvorlWarning, stacklevel=2)
        self._trackers.log(record_of(row, self._config))
        if is_new and self._config.tracking.video:
            self._film(row)
        self._within.begin(row["global_steps"])
        born = [agent for agent in lineage if agent["id"] > self._last_id]
        self._last_id = max(self._last_id, *(agent["id"] for agent in lineage))
        self._reach(row["agent_steps"])
        self._bar.n = row["agent_steps"]
        self._speed = speed(row["env_steps_per_second"])
        self._tell(generation_line(row, born, self._config))

    def _write_elite(self) -> bool:
        """Write the newest elite if it is not on disk yet; return whether it was written. Raises OSError."""
        if self._elite == self._written_elite:
            return False
        self._directory.write_elite(self._elite)
        self._written_elite = self._elite
        return True

    def _film(self, row: Row) -> None:
        """Record a video of the new elite for the trackers; a rendering error does not stop training."""
        try:
            path = film_elite(self._directory.path, row["generation"])
        except Exception as error:
            self._warn_once("film", f"tracking.video: no film of the best agent: {error}; training goes on")
        else:
            self._trackers.log_video(row["global_steps"], path)

    def _tell(self, line: str) -> None:
        self._bar.clear()
        say(line)
        self._bar.refresh()

    def _move_bar(self, steps: int) -> None:
        self._reach(self._bar.n + steps)
        self._bar.update(steps)

    def _show(self) -> None:
        """Show the phase, the mean return of recent episodes, and the speed on the bar."""
        self._bar.set_postfix_str(", ".join(filter(None, (self._phase, self._recent, self._speed))))

    def _reach(self, steps: float) -> None:
        """Grow the bar's total to `steps`: the last generation may end beyond `training.max_steps`."""
        self._bar.total = max(self._bar.total or 0.0, steps)


class _History:
    """Tracker records of the generations before this process, read from the file on each iteration."""

    def __init__(self, config: AnyConfig, metrics: JsonLines, warn_once: WarnOnce) -> None:
        self._config = config
        self._metrics = metrics
        self._warn_once = warn_once

    def __iter__(self) -> Iterator[Record]:
        try:
            for row in self._metrics.rows():
                yield record_of(row, self._config)
        except Exception as error:  # The file may have been edited, so any error is possible.
            self._warn_once("history", f"{self._metrics.path}: a line was changed or damaged: {error!r}")
