"""Reporting of a run: header, progress, generations and summary. Axes: P agents, N episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from evorl.config import AnyConfig
from evorl.envs.horizon import Horizon, announce
from evorl.envs.spaces import interface_to_json
from evorl.envs.spec import EnvSpec
from evorl.population.evaluation import EpisodeResults
from evorl.runs.archive import Archive
from evorl.runs.callbacks import LOGGED, Callback, Stop, call_each
from evorl.runs.directory import RunDirectory
from evorl.runs.elite import Score
from evorl.runs.logger import Logger, Row
from evorl.runs.metrics import Counts, evaluation_row, generation_row, lineage_rows
from evorl.runs.progress import Progress
from evorl.runs.within import Watched
from evorl.system.console import WarnOnce, say
from evorl.system.files import reason
from evorl.types import Agent


class Reporter:
    """Writes and prints a run's results on the main process; a no-op on other ranks."""

    def __init__(
        self,
        config: AnyConfig,
        directory: RunDirectory,
        horizon: Horizon,
        warn_once: WarnOnce,
        callbacks: Sequence[Callback],
        *,
        is_main: bool,
    ) -> None:
        self._config = config
        self._callbacks = callbacks
        self._horizon = horizon
        self._directory = directory
        self._warn_once = warn_once
        self._is_main = is_main
        self._logger: Logger | None = None

    def begin(self, header: Sequence[str], interface: EnvSpec, agent_steps: int, elite: bytes) -> None:
        """Print the header and open the logger at `agent_steps`; `elite` is the content of the elite's file."""
        if not self._is_main:
            return
        for line in header:
            say(line)
        announce(self._horizon, self._config.evaluation.max_steps)
        try:
            self._directory.write_interface(interface_to_json(interface))
        except OSError as error:
            self._warn_once("interface", f"{reason(error, self._directory.path)}; training goes on")
        self._logger = Logger(self._config, self._directory, self._warn_once, agent_steps, elite)

    def advance(self, steps: int, watched: Watched | None) -> None:
        """Advance the progress by `steps` of each agent; points of `watched` go to the trackers."""
        if self._logger is not None:
            self._logger.advance(steps, watched)

    def enter(self, phase: str) -> None:
        """Show the current phase of the generation."""
        if self._logger is not None:
            self._logger.enter(phase)

    def record(
        self,
        agents: list[Agent],
        results: EpisodeResults,
        counts: Counts,
        progress: Progress,
        seconds: Mapping[str, float],
        actors: Mapping[str, float] | None,
        archive: Archive,
    ) -> Stop | None:
        """Log a finished generation; `results` [P, N] are those of its evaluation.

        Returns the Stop of a callback, or None.
        """
        if self._logger is None:
            return None
        # Only reset steps are not counted, and without an ended episode there are none: a generation that has fewer
        # steps was cut short.
        if not counts.ended_episodes.any() and counts.steps.mean() >= self._horizon.steps * self._horizon.counted:
            self._warn_once(
                "episodes",
                f"no episode ended in generation {progress.generation}, which had {self._horizon.steps:,} steps of "
                "each environment, so train_return has no numbers",
            )
        if warning := self._config.algorithm.warning(counts.metrics):
            self._warn_once("metrics", f"{warning} (generation {progress.generation})")
        known = {name: value for name, value in asdict(progress).items() if name != "elite"}
        fitness = self._config.evolution.fitness
        scores = [Score.of(row) for row in results.fitness(fitness)]
        row = generation_row(agents, scores, counts, known, progress.elite, seconds, self._config)
        row |= evaluation_row(results, fitness, archive.evaluation_steps)
        row |= {} if actors is None else {"actors": dict(actors)}
        logged, stop = call_each(self._callbacks, row, agents)
        row |= {LOGGED: logged} if logged else {}
        self._logger.log(row, lineage_rows(agents, progress.generation), archive.payload)
        self._logger.enter("evolution")
        return stop

    def end(self, summary: Row) -> str:
        """Write and print the summary; return the write error, empty on success."""
        return "" if self._logger is None else self._logger.close(summary)
