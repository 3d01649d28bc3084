"""A run as its ranks live it together: begin, record, evolve, checkpoint, end. Axes: P agents."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from evorl.algorithms import Algorithm, Experience
from evorl.config import AnyConfig
from evorl.config.errors import on_one_line
from evorl.distributed import Peer, Placement
from evorl.distributed.signals import Interrupted
from evorl.envs.horizon import announce, horizon
from evorl.evolution import Context, evolve
from evorl.population import Learner, initial_population
from evorl.population.evaluation import Evaluator, Purpose
from evorl.randomness import derive_seed, numpy_generator, torch_generator
from evorl.runs.elite import Play, Score
from evorl.runs.header import header
from evorl.runs.metrics import Counts, curves, generation_row, lineage_rows
from evorl.runs.recovery import CheckpointManager, Progress
from evorl.runs.threads import use_threads
from evorl.runs.trackers import History, Trackers
from evorl.system.console import Terminal, say
from evorl.system.files import digest, reason
from evorl.system.formats import decode_agents, encode_agents
from evorl.system.timing import Stopwatch
from evorl.types import Agent, EvorlWarning, RunFailed, UserError


class Run:
    """The surroundings of the training loop that concern all ranks: files, evolution, progress and the end.

    `agents` are the whole population, the same on every rank. Only the main process writes and speaks.
    """

    def __init__(
        self,
        config: AnyConfig,
        placement: Placement,
        algorithm: Algorithm,
        experience: Experience,
        stopwatch: Stopwatch,
    ) -> None:
        self.config = config
        self.placement = placement
        self.ranks = placement.ranks
        self.algorithm = algorithm
        self.progress = Progress(next_id=config.population.size)
        self.stopwatch = stopwatch
        self._threads = use_threads(config.run.threads, algorithm.interface.parts, self.ranks.on_host)
        self._context = Context(config.evolution, algorithm.networks)
        self._training_seconds = 0.0
        self._elite, self._elite_is_written = b"", True
        self._archive: list[Agent] = []
        self._returns: dict[int, NDArray[np.float64]] = {}
        self.horizon = horizon(config, placement.copies, experience.period)
        self._checkpoints = CheckpointManager(config, placement, algorithm, experience)
        self._directory = self._checkpoints.directory
        self._trackers: Trackers | None = None
        self._bar: tqdm[Any] | None = None
        restored = self._checkpoints.restore()
        if restored is None:
            self.agents = initial_population(config, algorithm)
        else:
            self.progress, self.agents, self._elite = restored.progress, restored.agents, restored.elite
            # A target that was reached may have been raised since.
            target, bound = config.training.target_fitness, self.progress.elite.lower_bound
            self.progress.solved &= target is not None and bound is not None and bound >= target
        self._unsaved = ""
        self._before = self.progress.wall_clock_seconds
        self._began = time.perf_counter()

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def generation(self) -> int:
        """Return the generation that trains now, from 1."""
        return self.progress.generation + 1

    @property
    def finished(self) -> bool:
        """Return whether the target is reached or the steps are used up; all ranks decide from the same numbers."""
        return self.progress.solved or self.progress.agent_steps >= self.config.training.max_steps

    def seed(self, purpose: str) -> int:
        """Return this rank's seed for one purpose in this generation."""
        return derive_seed(self.config.seed, generation=self.generation, rank=self.ranks.rank, purpose=purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """Return this rank's generator for one purpose in this generation."""
        rank, device = self.ranks.rank, self.ranks.device
        return torch_generator(self.config.seed, generation=self.generation, rank=rank, purpose=purpose, device=device)

    def __enter__(self) -> Self:
        if self.ranks.is_main:
            pace = self.algorithm.pace(self.placement.copies)
            for line in header(self.config, self.placement, pace, threads=self._threads, directory=self.path):
                say(line)
            announce(self.horizon, self.config.evaluation.max_steps)
            self._trackers = Trackers(self.config, self.path, self._history())
            total, done = self.config.training.max_steps, self.progress.agent_steps
            self._bar = tqdm(
                total=total, initial=done, unit="step", desc=self.path.name, dynamic_ncols=True, file=Terminal()
            )
        return self

    def _history(self) -> History:
        """Return what trackers should have of the generations before this process."""
        try:
            rows = self._directory.metrics.read()
            return [(row["generation"], row["global_steps"], curves(row)) for row in rows]
        except Exception as error:  # Whatever stands in a file that others may have changed.
            self._checkpoints.warn_once(
                "history", f"{self._directory.metrics.path}: a line is not as it was written: {error!r}"
            )
            return ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        because = "" if error is None else _why(error)
        if isinstance(error, Interrupted):
            # A launcher ends all ranks once one has ended.
            because = self.ranks.last_words()
        elif error is not None and not getattr(error, "told", False):
            self.ranks.end(because)
        if not self.ranks.is_main:
            self._directory.release()
            return
        score = self.progress.elite.score
        summary = {
            "solved": self.progress.solved,
            "best_fitness": score.mean if score else None,
            "best_fitness_std": score.std if score else None,
            "best_fitness_episodes": score.episodes if score else 0,
            "generations": self.progress.generation,
            "global_steps": self.progress.global_steps,
            "agent_steps": self.progress.agent_steps,
            "wall_clock_seconds": self._before + time.perf_counter() - self._began,
            "ranks": self.ranks.size,
            "ended": "finished"
            if error is None
            else error.name
            if isinstance(error, Interrupted)
            else type(error).__name__,
            "because": because or None,
        }
        if error is None and self._unsaved:
            summary |= {"ended": "unsaved", "because": self._unsaved}
        if self._bar is not None:
            self._bar.close()
        try:
            self._directory.flush()
            self._directory.write_summary(summary)
        except OSError as problem:
            self._unsaved = self._unsaved or reason(problem, self.path)
        if self._trackers is not None:
            self._trackers.finish(summary, self._directory.lineage.read())
        self._directory.release()
        if error is None and self._unsaved:
            raise RunFailed(f"the run ended, but what it came to in the end was not saved: {self._unsaved}")

    def steps(self) -> Iterator[int]:
        """Yield the vector steps of one generation, shown on the bar."""
        started = time.perf_counter()
        each = self.config.environment.num_envs * self.placement.copies
        for step in range(self.horizon.steps):
            yield step
            if self._bar is not None:
                self._bar.update(each)
        self._training_seconds = time.perf_counter() - started

    def gather_agents(self, learner: Learner) -> list[Agent]:
        """Return all trained agents, on every rank: those of rank 0 where replicas have drifted apart."""
        payload = encode_agents(learner.to_agents())
        if not self.placement.is_sharded:
            different = self.ranks.differing(digest(payload), "trained agents")
            if not different:
                return learner.policy.agents
            self.progress.drifts += 1
            if self.ranks.is_main:
                warnings.warn(_drift(self.ranks.peers, different, self.generation), EvorlWarning, stacklevel=2)
            return decode_agents(self.ranks.broadcast_bytes(payload, "rank 0's agents"), "rank 0's agents")
        parts = self.ranks.gather_bytes(payload, "the other ranks' trained agents")
        return [agent for part in parts for agent in decode_agents(part, "another rank's agents")]

    def assign_fitness(self, trained: list[Agent], returns: NDArray[np.float64], evaluator: Evaluator) -> None:
        """Give each agent its fitness, the mean of its `returns` [P, episodes], and see who is the best so far.

        An agent that a fault kept from learning has no fitness. The elite is measured again on the same episodes; where
        it is beaten there, both play further ones. The target is tested on fresh episodes of who is then the elite.
        """
        self._returns = {agent.id: row for agent, row in zip(trained, returns, strict=True)}
        for agent, row in zip(trained, returns, strict=True):
            agent.fitness = float(row.mean()) if np.isfinite(row).all() and agent.fault is None else None
        settings, elite, best = self.config.evaluation, self.progress.elite, _best(trained)
        target, confirms = self.config.training.target_fitness, settings.confirmation_episodes
        hopes = best.fitness, elite.score.mean if elite.score else None
        seems_reached = target is not None and any(hope is not None and hope >= target for hope in hopes)
        if self._beats_elite(best, evaluator):
            # With the mean that is known of it by now, and not with that of the episodes that chose it.
            known = replace(best, fitness=elite.score.mean if elite.score else None)
            self._elite, self._elite_is_written, self._archive = encode_agents([known]), False, []
        play = self._play(self._archive or [best], "target", evaluator) if confirms else None
        self.progress.solved = target is not None and elite.reaches(
            target, settings.error, seems_reached, play, confirms
        )

    def _beats_elite(self, best: Agent, evaluator: Evaluator) -> bool:
        """Let a generation's best agent challenge the elite, which plays the same episodes, and return whether it won.

        The elite is then in the archive, with its mean on the generation's episodes as its fitness.
        """
        settings, elite, again = self.config.evaluation, self.progress.elite, None
        self._archive = decode_agents(self._elite, "the elite") if self._elite else []
        for agent in self._archive:
            again = self._play([agent], "generation", evaluator)(0, settings.episodes)[0]
            agent.fitness = float(again.mean())
        if best.fitness is None:
            if again is not None:
                elite.note(Score.of(again))
            return False
        confirms = settings.confirmation_episodes
        play = self._play([best, *self._archive], "confirmation", evaluator) if confirms else None
        return elite.challenge(self._returns[best.id], again, play, confirms, self.generation)

    def _play(self, agents: list[Agent], purpose: Purpose, evaluator: Evaluator) -> Play:
        return partial(evaluator.remeasure, agents, self.generation, purpose)

    def record(self, trained: list[Agent], counts: Counts) -> None:
        """Write the generation's lines and curves; the seconds of an evolution appear in the next generation's."""
        progress = self.progress
        progress.generation += 1
        progress.agent_steps += int(counts.steps.mean())
        progress.global_steps += int(counts.steps.sum())
        progress.wall_clock_seconds = self._before + time.perf_counter() - self._began
        seconds = {"training": self._training_seconds, **self.stopwatch.seconds}
        self.stopwatch.clear()
        if not self.ranks.is_main:
            return
        if not counts.ended_episodes.any():
            self._checkpoints.warn_once(
                "episodes",
                f"no episode ended in generation {progress.generation}, which had {self.horizon.steps:,} steps of each "
                "environment, so train_return has no numbers",
            )
        scores = [Score.of(self._returns[agent.id]) for agent in trained]
        numbers = {name: value for name, value in asdict(progress).items() if name != "elite"}
        row = generation_row(trained, scores, counts, numbers, progress.elite, seconds)
        self._write(row, lineage_rows(trained, progress.generation))
        if self._trackers is not None:
            self._trackers.log(progress.generation, progress.global_steps, curves(row))
        if self._bar is not None:
            shown = {"best": row["best_fitness"], "mean": row["mean_fitness"], "rate": row["env_steps_per_second"]}
            self._bar.n = progress.agent_steps
            self._bar.set_postfix({name: round(value) for name, value in shown.items() if value is not None})

    def evolve(self, trained: list[Agent]) -> None:
        """Select and mutate on the main process and checkpoint; every other rank reloads the new agents.

        Raises UserError, on all ranks, where a fault has stopped every agent.
        """
        if all(agent.fault for agent in trained):
            faults = "; ".join(f"agent {agent.id}: {agent.fault}" for agent in trained[:4])
            raise UserError(
                f"all agents were lost in generation {self.progress.generation} ({faults}); a lower "
                "algorithm.learning_rate or an algorithm.max_grad_norm would be gentler",
                reported_elsewhere=not self.ranks.is_main,
            )
        payload = b""
        if self.ranks.is_main:
            archive = self._archive if self.config.evolution.selection.archive else []
            rng = numpy_generator(self.config.seed, generation=self.progress.generation, rank=0, purpose="evolution")
            agents = evolve(trained, self._context, self.progress.next_id, rng, archive)
            self.progress.next_id = max(self.progress.next_id, 1 + max(agent.id for agent in agents))
            payload = encode_agents(agents)
        with self.stopwatch("checkpoint"):
            self._unsaved = self._checkpoints.save(self.progress, payload, self._elite)
        self.agents = self._checkpoints.reload(payload, self.progress.generation)
        self.ranks.assert_identical(digest(encode_agents(self.agents)), "evolved agents")

    def _write(self, row: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        """Write a generation's lines and a new elite; what the disk does not take now is tried again next time."""
        self._directory.metrics.add([row])
        self._directory.lineage.add(lineage)
        try:
            self._directory.flush()
            if not self._elite_is_written:
                self._directory.write_elite(self._elite)
                self._elite_is_written = True
            self._checkpoints.reset_warning("lines")
        except OSError as error:
            self._checkpoints.warn_once(
                "lines", f"{reason(error, self.path)}; training goes on, and this is tried again"
            )
        for agent in lineage:
            if agent["fault"]:
                what = f"agent {agent['id']} stopped learning in generation {row['generation']}: {agent['fault']}"
                warnings.warn(f"{what}; the next evolution replaces it", EvorlWarning, stacklevel=2)


def _end_name(error: BaseException | None) -> str:
    """Return how a run ended, in a word."""
    if error is None:
        return "finished"
    return error.name if isinstance(error, Interrupted) else type(error).__name__


def _why(error: BaseException) -> str:
    """Return why a run ends, in one line."""
    known = isinstance(error, UserError | RunFailed)
    return on_one_line(str(error) if known else f"{type(error).__name__}: {error}")


def _drift(peers: Sequence[Peer], different: Sequence[int], generation: int) -> str:
    """Return the warning for ranks that hold other agents than rank 0."""
    others = sorted({peers[rank].cpu for rank in different} - {peers[0].cpu})
    cause = (
        f"{', '.join(others)} rounds otherwise than {peers[0].cpu}" if others else "although their CPUs are of a kind"
    )
    ranks = f"rank {', '.join(map(str, different))}"
    return f"{ranks} trained other agents than rank 0 in generation {generation} ({cause}); those of rank 0 are taken"


def _best(agents: Sequence[Agent]) -> Agent:
    """Return the best agent; of several the newest."""
    return max(agents, key=lambda agent: (agent.fitness is not None, agent.fitness or 0.0, agent.id))
