"""The lifecycle of a run on all ranks: begin, record, evolve, checkpoint, end. Axes: P agents, N episodes."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.fields import BENCHMARK, RATING
from evorl.distributed import Placement, RankLost, Ranks
from evorl.distributed.pauses import SAVE
from evorl.envs import SteppedEnvironments
from evorl.envs.games import is_game
from evorl.envs.generation import GenerationPlan, generation_plan
from evorl.envs.tensor.sources import is_tensor, simulator_of
from evorl.evolution.mutation import Context
from evorl.evolution.selection import begins, evolve, rank_correlation, selects
from evorl.league.league import League
from evorl.networks import small_image_setting
from evorl.population import Learner, Policy
from evorl.population.evaluation import Evaluator
from evorl.replay import Experience
from evorl.runs.agents.comparison import compare, comparison_of, episodes_of
from evorl.runs.agents.fitness import Fitness, generation_fitness
from evorl.runs.launch import use_threads
from evorl.runs.output.callbacks import Callback
from evorl.runs.output.console import header
from evorl.runs.output.logger import EVALUATION, Logger
from evorl.runs.output.metrics import Counts, RecentEpisodes
from evorl.runs.reading.opponents import Opponent, load_benchmark
from evorl.runs.reading.transfer import first_agents
from evorl.runs.storage.checkpoint import CheckpointManager, Part
from evorl.runs.storage.directory import SUMMARY, RunDirectory, from_here
from evorl.runs.storage.progress import Position, Progress
from evorl.seeding import derive_seed, numpy_generator, torch_generator
from evorl.system.console import WarnOnce, say
from evorl.system.files import digest, read_object
from evorl.system.formats import decode_agents, encode_agents
from evorl.system.plugins import described
from evorl.system.signals import Interrupted, raise_if_signalled, signalled, signals_deferred
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent
from evorl.types.messages import on_one_line
from evorl.types.outcomes import FINISHED, STOPPED, EvorlWarning, RunFailed, UserError

GOES_ON = "a resumed run goes on"
NOT_SAVED = "there is no checkpoint yet, and a resumed run starts over"
"""Where a resumed run begins, in words: after or within a generation, or at the start."""


class Run:
    """The collective parts of a training run outside the training loop: files, evolution, progress and termination.

    `generation` is the current generation, from 1. `summary` says how the run ended, and is empty until then. Only the
    main process writes files, prints and calls `callbacks`.
    """

    generation_plan: GenerationPlan
    """The length of the current generation; `_whole_plan` is that of a whole one."""
    progress: Progress
    """With the elite, which each generation's best agent challenges."""
    league: League | None
    """Of a game: who fills the other seats."""
    _benchmark: Opponent | None
    """Of a game: who moves in the other seat of evaluation episodes."""
    agents: list[Agent]
    """The population to train, the same on every rank: the initial one, or that of the checkpoint that is resumed."""
    summary: Mapping[str, Any]
    _logger: Logger | None
    """On the main process, once the run is entered."""
    _kept: dict[str, Any]
    """Of a run that had finished before: what its summary says of the training, and goes on to say."""
    _recorded: Progress
    """The progress at the last generation recorded."""
    _resumes: str
    """Where the run goes on if it ends now and is resumed, in words."""
    _unsaved: str
    """The reason why the newest checkpoint was not saved, or ""."""
    _stopped: str
    """The reason why a callback stopped the run, or ""."""

    def __init__(
        self,
        config: AnyConfig,
        placement: Placement,
        algorithm: Algorithm,
        experience: Experience,
        environments: SteppedEnvironments | None,
        stopwatch: Stopwatch,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Claim the run's directory and restore its newest checkpoint, if any. Raises UserError on all ranks.

        `environments` are None where actors have them: their running episodes are not saved.
        """
        self.config, self.placement, self.ranks = config, placement, placement.ranks
        self.algorithm, self.stopwatch, self._callbacks = algorithm, stopwatch, callbacks
        self._threads = use_threads(config, algorithm.interface.parts, self.ranks.on_host, self.ranks.device)
        self._whole_plan = self.generation_plan = generation_plan(config, placement.copies, experience.period)
        self.league = None
        self._directory = RunDirectory.open(config, self.ranks)
        try:
            self._prepare(experience, environments)
        except BaseException:
            # An interactive session keeps the error, and with it this object: the directory must not stay locked.
            self._let_go()
            raise

    def _prepare(self, experience: Experience, environments: SteppedEnvironments | None) -> None:
        """Restore the newest checkpoint of the claimed directory, or make the first agents."""
        config, placement, algorithm, directory = self.config, self.placement, self.algorithm, self._directory
        self._warn_once = WarnOnce(speaks=self.ranks.is_main)
        self._checkpoints = CheckpointManager(
            config,
            placement,
            algorithm,
            experience,
            environments,
            self.generation_plan.carries_over,
            directory,
            self._warn_once,
        )
        self.league = League(config, placement, algorithm) if is_game(config.environment.id) else None
        self._benchmark = None
        if self.league is not None:
            self._benchmark = load_benchmark(config, self.ranks, algorithm.interface)
        restored = self._checkpoints.restore()
        if restored is None:
            # The settings may be those of a branch, but this run begins anew.
            run = config.run.model_copy(update={"branch_of": None})
            self.config = config = config.model_copy(update={"run": run})
            self.progress = Progress.of_new_run(config)
            self.agents = first_agents(config, algorithm, self.ranks)
        else:
            self.progress, self.agents = restored
            # A run may go a little beyond its last step.
            whole = self._whole_plan.steps * self._whole_plan.agent_steps_per_vector_step
            if self._steps_left <= -whole:
                raise UserError(
                    f"training.max_steps: {from_here(self.path)} has trained {self.progress.agent_steps:,} steps of "
                    f"each agent, more than {config.training.max_steps:,}",
                    reported_elsewhere=not self.ranks.is_main,
                )
            if self.league is not None and self.progress.league is not None:
                archive = decode_agents(self.progress.archive, "the archive") if self.progress.archive else []
                self.league.restore(self.progress.league, archive)
            # What was certain against another benchmark says nothing of a target that was lowered since.
            if self.progress.solved or not self._has_other_benchmark:
                self.progress.solved = self.progress.is_solved(config)
        self._checkpoints.roll_back(self.progress)
        self._unsaved = self._stopped = ""
        self._signals = contextlib.ExitStack()
        summary = read_object(self.path / SUMMARY) if self.finished else {}
        self._kept = {name: summary[name] for name in ("ranks", "wall_clock_seconds") if name in summary}
        directory.begin(config, self.ranks, finished=self.finished)
        self.generation = self.progress.generation + 1
        self._resumes = NOT_SAVED
        if restored is not None:
            self._resumes = f"{GOES_ON} after generation {self.progress.generation}"
            if self.progress.position is not None:
                self._resumes = f"{GOES_ON} within generation {self.generation}"
        measured_otherwise = self.progress.measured_otherwise(config)
        if self._benchmark is not None:
            if restored is not None and not self.finished and self._has_other_benchmark:
                measured_otherwise = True
                self._warn_once(
                    BENCHMARK,
                    f"{BENCHMARK}: {from_here(self._benchmark.name)} has another best agent than when this run was "
                    "saved, so the elite is measured again and later scores are not comparable with earlier ones",
                )
            self.progress.benchmark = self._benchmark.digest
        self.progress.note_setup(config, placement)
        self._recorded = self.progress.copy()
        self._logger = None
        self.summary = {}
        self._training_seconds = 0.0
        if measured_otherwise and not self.finished:
            self.progress.elite.forget_episodes()
        self._before = self.progress.wall_clock_seconds
        self._began = time.perf_counter()

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def finished(self) -> bool:
        """True if the target is reached, the steps are used up, or a callback stopped the run; same on all ranks."""
        spent = self.progress.generation > 0 and self._whole_plan.is_spent(self._steps_left)
        return self.progress.solved or spent or bool(self._stopped)

    @property
    def _has_other_benchmark(self) -> bool:
        """True if the best agent of the run that is the benchmark is another than at the checkpoint."""
        return self._benchmark is not None and self.progress.benchmark != self._benchmark.digest

    @property
    def _steps_left(self) -> int:
        return self.config.training.max_steps - self.progress.agent_steps

    @property
    def carries_over(self) -> bool:
        """True if running episodes continue: from the previous generation, or from this one's interim checkpoint."""
        return self.progress.position is not None or (self.generation_plan.carries_over and self.generation > 1)

    def seed(self, purpose: str) -> int:
        """This rank's seed for one purpose in this generation."""
        return derive_seed(self.config.seed, generation=self.generation, rank=self.ranks.rank, purpose=purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """This rank's random generator for one purpose in this generation, on its device."""
        rank, device = self.ranks.rank, self.ranks.device
        return torch_generator(self.config.seed, generation=self.generation, rank=rank, purpose=purpose, device=device)

    def __enter__(self) -> Self:
        self._pauses = self.ranks.pauses(together=not self.placement.is_sharded)
        try:
            if self.ranks.is_main:
                self._open_logger()
        except BaseException:
            self._pauses.close()
            self._let_go()
            raise
        self._signals.enter_context(signals_deferred(lambda: self._resumes))
        return self

    def _let_go(self) -> None:
        """Release everything that a run holds if it fails before its first generation."""
        if self.league is not None:
            self.league.close()
        self._directory.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pauses.close()
        if self.league is not None:
            self.league.close()
        failed, number = error, signalled()
        if error is not None and number is not None and not isinstance(error, Interrupted | RankLost):
            # The signal has also reached the environments' processes, whose end makes this one fail. A rank that is
            # lost was so before the signal, with which the launcher then ends this one.
            error = Interrupted(number)
        because = self._unsaved or self._stopped if error is None else exchange_reasons(error, self.ranks)
        self.progress.wall_clock_seconds = self._wall_clock_seconds()
        told_to_end = number is not None or isinstance(error, KeyboardInterrupt)
        if error is not None and told_to_end and self.ranks.is_main:
            say(self._resumes)
        ended = end_of(error, self._unsaved, self._stopped)
        self._recorded.wall_clock_seconds = self.progress.wall_clock_seconds
        self.summary = summary_of(self._recorded, self.config, self.ranks.size, ended, because) | self._kept
        try:
            not_written = self._logger.close(self.summary) if self._logger else ""
        finally:
            # At a prompt, the traceback of another interruption would keep the lock.
            self._directory.release()
            with contextlib.suppress(Interrupted):
                self._signals.close()
        if error is not None and error is not failed:
            raise error from failed
        if error is None and (unsaved := self._unsaved or not_written):
            raise RunFailed(f"the run ended, but its final state was not saved: {unsaved}")

    def generations(self) -> Iterator[int]:
        """Yield the generations to train, until `finished`.

        Sets `generation_plan`, which is shorter for the last generation if fewer steps are left. Raises Interrupted
        after a signal: from the end of its evaluation on, a generation is completed and saved first.
        """
        while not self.finished:
            raise_if_signalled()
            self.generation_plan = self._whole_plan.within(self._steps_left)
            self.generation = self.progress.generation + 1
            yield self.generation

    def set_opponents(self, environments: SteppedEnvironments) -> None:
        """Fill the other seats of a game from the league for this generation; other environments have none."""
        if self.league is not None:
            self.league.set_opponents(environments, self.agents, self.generation)

    def steps(
        self, at_once: int = 1, recent: RecentEpisodes | None = None, parts: Sequence[Part] = ()
    ) -> Iterator[int]:
        """Yield the index of each vector step of a generation, in strides of `at_once` if rollouts arrive whole.

        The trackers receive the means over `recent` episodes. With the `parts` of the training (policy, learner,
        experience), a generation is saved every `checkpoint.minutes` and on a signal, and resumed where it was saved.
        """
        position, done = self.progress.position, 0
        steps_per_round = self.config.environment.num_envs * self.placement.copies
        if position is not None:
            done = self._checkpoints.resume(self.progress, parts)
            self._resumes = f"{GOES_ON} {self._within(done)}"
            self.stopwatch.seconds.update(position.seconds)
            if self.ranks.is_main:
                say(f"going on {self._within(done)}")
        started = time.perf_counter() - (position.training_seconds if position else 0.0)
        if self._logger:
            self._logger.begin(self.generation, done * steps_per_round, self.generation_plan.steps * steps_per_round)
        if parts:
            self._pauses.begin(done, self.generation_plan.steps)
        for step in range(done, self.generation_plan.steps, at_once):
            yield step
            if self._logger:
                self._logger.advance(steps_per_round * at_once, recent)
            if parts:
                self._pause(step + at_once, parts, time.perf_counter() - started)
            else:
                raise_if_signalled()
        if parts:
            self._pauses.leave()
        self._training_seconds = time.perf_counter() - started
        if self._logger:
            self._logger.enter(EVALUATION)

    def _pause(self, done: int, parts: Sequence[Part], training_seconds: float) -> None:
        """Save after `done` steps if it is due or if a signal has come, at the same step on all ranks.

        Raises Interrupted after a signal, to this rank or another one.
        """
        number = signalled()
        paused = self._pauses.reached(done, SAVE if number is None and self._checkpoints.is_due else number)
        if paused is False:
            return
        if paused is None:
            self._checkpoints.postpone()
            raise_if_signalled()
            if self._pauses.reason != SAVE:
                raise Interrupted(self._pauses.reason)
            return
        reason = self._pauses.reason
        self.progress.wall_clock_seconds = self._wall_clock_seconds()
        position = Position([], training_seconds, dict(self.stopwatch.seconds))
        agents = encode_agents(self.agents) if self.ranks.is_main else b""
        problem = self._checkpoints.save_within(self.progress, agents, parts, done, position)
        if problem:
            what = f"the run could not be saved {self._within(done)}: {problem}"
            self._warn_once("interim", what if reason else f"{what}; training goes on")
        else:
            self._warn_once.reset("interim")
            self._resumes = f"{GOES_ON} {self._within(done)}"
        if reason != SAVE:
            raise Interrupted(reason)

    def _within(self, done: int) -> str:
        """The place in this generation after `done` steps of this rank, in words."""
        steps_per_round = self.config.environment.num_envs * self.placement.copies
        steps, whole = done * steps_per_round, self.generation_plan.steps * steps_per_round
        return f"within generation {self.generation} after {steps:,} of {whole:,} steps of each agent"

    def gather_agents(self, learner: Learner) -> list[Agent]:
        """All trained agents, on every rank. If replicas have drifted apart, every rank takes those of rank 0."""
        ranks, payload = self.ranks, encode_agents(learner.to_agents())
        if self.placement.is_sharded:
            parts = ranks.gather_bytes(payload, "the other ranks' trained agents")
            return [agent for part in parts for agent in decode_agents(part, "another rank's agents")]
        drifted = ranks.differing(digest(payload), "trained agents")
        if not drifted:
            return learner.policy.agents
        self.progress.drifts += 1
        agents = decode_agents(ranks.broadcast_bytes(payload, "rank 0's agents"), "rank 0's agents")
        if ranks.is_main:
            cpus = ", ".join(sorted({peer.cpu for peer in ranks.peers}))
            warnings.warn(
                f"rank {', '.join(map(str, drifted))} diverged from rank 0 in generation {self.generation} (CPUs: "
                f"{cpus}); all continue with rank 0's agents",
                EvorlWarning,
                stacklevel=2,
            )
        return agents

    def assign_fitness(self, trained: list[Agent], policy: Policy, counts: Counts, evaluator: Evaluator) -> Fitness:
        """Assign each agent its fitness, from evaluation or training episodes, and let the best challenge the elite.

        The run is solved if the elite then reaches the target on fresh episodes.
        """
        if not self.placement.is_sharded and trained is not policy.agents:
            # Replicas have drifted apart: those that this rank trained are not the agents that are kept.
            policy = Policy(trained, self.algorithm, self.generator("evaluation"))
        if self._benchmark is not None:
            evaluator.set_opponents(self._benchmark.seat)
        elite = self.progress.elite
        evaluator.repeats = elite.repeats
        rated = self._rate(trained)
        fitness = rated or generation_fitness(
            self.config, policy, trained, evaluator, self.generation, counts.train_return, counts.train_episodes
        )
        self.progress.solved = elite.compete(self.config, trained, fitness, evaluator, self.generation)
        self.progress.pairs = []
        if self.config.population.control and self._whole_plan.is_spent(self._steps_left - int(counts.steps.mean())):
            self.progress.pairs = compare(self.config, trained, evaluator, self.generation)
        return replace(fitness, steps=evaluator.pop_steps() + (self.league.pop_steps() if self.league else 0))

    def _rate(self, trained: list[Agent]) -> Fitness | None:
        """Play the matches of a game's league and let its archive grow; the ratings, if they are the fitness."""
        if self.league is None:
            return None
        is_rated = RATING in self.config.evolution.fitness
        payload = self.progress.elite.payload if is_rated else b""
        elite = decode_agents(payload, "the elite") if payload else []
        rated = self.league.evaluate(trained, self.generation, elite)
        self.league.admit(trained, self.generation)
        self.progress.league, self.progress.archive = self.league.standings, self.league.payload
        return Fitness.of_ratings(rated) if is_rated else None

    def record(
        self,
        trained: list[Agent],
        fitness: Fitness,
        counts: Counts,
        actors: Mapping[str, float] | None = None,
    ) -> None:
        """Update the progress, log the generation to files and trackers, and call the callbacks.

        `fitness` is that of the `trained` agents, `actors` the statistics of actor processes. The seconds spent on
        evolution appear in the next generation's line. Raises UserError on all ranks if a callback misbehaves.
        """
        progress = self.progress
        counted = int(counts.steps.mean())
        progress.generation = self.generation
        shortened = self.generation_plan.steps < self._whole_plan.steps
        progress.shortened_by = self.config.training.max_steps if shortened else None
        progress.agent_steps += counted
        progress.global_steps += int(counts.steps.sum())
        progress.evaluation_steps += fitness.steps
        progress.wall_clock_seconds = self._wall_clock_seconds()
        spent = progress.agent_steps / self.config.training.max_steps
        evolution, size = self.config.evolution, self.config.population.size
        for island, place in zip(progress.islands, self.config.population.places, strict=False):
            island.rank_correlation = rank_correlation(trained[place])
            begun = begins(evolution, self.generation, island.rank_correlation, spent)
            if island.selection_began is None and selects(evolution, size) and begun:
                island.selection_began = self.generation
        seconds = {"training": self._training_seconds, **self.stopwatch.seconds}
        self.stopwatch.seconds.clear()

        def written() -> bytes:
            assert self._logger is not None
            stop = self._logger.record(trained, fitness, counts, progress, seconds, actors)
            return b"" if stop is None else stop.reason.encode() or b"a callback"

        stopped = self.ranks.from_main(written, "the main process's callbacks").decode()
        self._stopped = "" if self.finished else stopped
        # The summary uses this snapshot: a signal may arrive when the next elite is chosen but not yet on disk.
        self._recorded = progress.copy()

    def evolve(self, trained: list[Agent]) -> list[Agent]:
        """The agents of the next generation on the main process, and an empty list on other ranks.

        Raises UserError on all ranks if a fault has stopped every agent.
        """
        progress, generation = self.progress, self.generation
        population, seed = self.config.population, self.config.seed
        for place in population.places:
            if not all(agent.fault for agent in trained[place]):
                continue
            whom = "agents" if len(population.places) == 1 else "agents of an island, or of a twin,"
            faults = "; ".join(f"agent {agent.id}: {agent.fault}" for agent in trained[place][:4])
            raise UserError(
                f"all {whom} were lost in generation {generation} ({faults}); lower algorithm.learning_rate, scale "
                "rewards to about 1, or set algorithm.reward_clip or max_grad_norm",
                reported_elsewhere=not self.ranks.is_main,
            )
        if not self.ranks.is_main:
            return []
        evolved: list[Agent] = []
        context = Context(self.config.evolution, self.algorithm.networks)
        # A twin's selection never begins: it only loses agents to faults.
        begun = [island.selection_began is not None for island in progress.islands]
        begun += [False] * (len(population.places) - population.islands)
        for number, place in enumerate(population.places):
            rng = numpy_generator(seed, generation=generation, rank=number, purpose="evolution")
            evolved += evolve(trained[place], context, progress.next_id, rng, generation, begun[number])
            progress.next_id = max(progress.next_id, 1 + max(agent.id for agent in evolved))
        return evolved

    def checkpoint(self, evolved: list[Agent]) -> list[Agent]:
        """Save a checkpoint with the main process's agents; reload and return them on all ranks.

        A failing disk is reported, and training continues.
        """
        if self._logger:
            self._logger.enter("checkpoint")
        payload = encode_agents(evolved) if self.ranks.is_main else b""
        self._unsaved = self._checkpoints.save(self.progress, payload)
        if not self._unsaved:
            self._resumes = f"{GOES_ON} after generation {self.generation}"
        elif self._resumes == NOT_SAVED and self.generation > 1:
            self._resumes = "no checkpoint could be written, so the run cannot be resumed"
        agents = self._checkpoints.reload(payload, self.generation)
        self.ranks.assert_identical(digest(encode_agents(agents)), "evolved agents")
        return agents

    def _open_logger(self) -> None:
        """Print the header, and open the run's files and trackers."""
        config, placement, interface = self.config, self.placement, self.algorithm.interface
        lines = header(config, placement, threads=self._threads, directory=self.path)
        setting = small_image_setting(interface.parts)
        if setting and config.network.name == "standard" and config.network.convolutions is None:
            lines.append(f"layers for small images: {setting}")
        length = self._whole_plan.steps * self._whole_plan.agent_steps_per_vector_step
        if length >= 2 * config.evolution.steps:
            whole = "whole rollouts" if self._whole_plan.period > 1 else "one step or more"
            lines.append(
                f"each generation has {length:,} steps of each agent, not {config.evolution.steps:,} "
                f"(evolution.steps): {whole} of every environment"
            )
        if is_tensor(config.environment.id) and not simulator_of(config.environment).can_save:
            lines.append(
                f"{config.environment.id}: its state cannot be saved, so each generation begins new episodes, and a "
                "resumed run repeats the generation that was broken off"
            )
        for line in lines:
            say(line)
        if shortfall := self._whole_plan.shortfall(config.evaluation.max_steps):
            warnings.warn(shortfall, EvorlWarning, stacklevel=2)
        self._logger = Logger(
            config,
            self._directory,
            self._whole_plan,
            interface,
            self._warn_once,
            self._callbacks,
            self.progress,
        )

    def _wall_clock_seconds(self) -> float:
        return self._before + time.perf_counter() - self._began


def summary_of(progress: Progress, config: AnyConfig, ranks: int, ended: str, because: str) -> dict[str, Any]:
    """The summary for `summary.json` and the trackers.

    `progress` is that of the last recorded generation. `ended` is one word from `end_of`, `because` the reason or "".
    """
    return {
        "solved": None if config.training.target_fitness is None or config.population.control else progress.solved,
        **progress.elite.facts(),
        "episodes_repeat": bool(progress.elite.repeats),
        "generations": progress.generation,
        "global_steps": progress.global_steps,
        "agent_steps": progress.agent_steps,
        "evaluation_steps": progress.evaluation_steps,
        "wall_clock_seconds": progress.wall_clock_seconds,
        "ranks": ranks,
        "comparison": comparison_of(progress.pairs, episodes_of(config)) if progress.pairs else None,
        "ended": ended,
        "because": because or None,
    }


def end_of(error: BaseException | None, unsaved: str, stopped: str) -> str:
    """The end of a run: `finished`, `stopped`, `unsaved`, or the name of the signal or exception."""
    if error is None:
        return "unsaved" if unsaved else STOPPED if stopped else FINISHED
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    return error.name if isinstance(error, Interrupted) else type(error).__name__


def exchange_reasons(error: BaseException, ranks: Ranks) -> str:
    """Say in one line why a run ends, and publish this rank's reason unless another rank reports the error."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        # A launcher kills all ranks once one has exited, so the reason may be another rank's.
        return ranks.first_reason()
    expected = isinstance(error, UserError | RunFailed)
    because = on_one_line(str(error) if expected else described(error))
    if isinstance(error, UserError) and error.reported_elsewhere:
        return because
    if ranks.end(because) and isinstance(error, UserError) and error.reported_elsewhere is None:
        error.reported_elsewhere = True
    return because
