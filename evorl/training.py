"""A run as its ranks live it together: begin, record, evolve, checkpoint, end. Axes: P agents."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from evorl.algorithms import Algorithm, Experience
from evorl.checkpoint import (
    decode_agents,
    decode_tensors,
    digest,
    encode_agents,
    encode_tensors,
    entry,
    write_atomically,
)
from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.evaluation import Evaluator
from evorl.evolution import Context, elite, evolve
from evorl.metrics import Counts, curves, generation_row, lineage_rows
from evorl.population import Population, found_population
from evorl.randomness import derive_seed, numpy_generator, torch_generator
from evorl.run import RunDirectory
from evorl.timing import Stopwatch
from evorl.tracking import Trackers
from evorl.types import Agent, EvorlWarning


@dataclass
class Progress:
    """Where a run stands, as its checkpoint remembers it."""

    generation: int = 0
    agent_steps: int = 0
    global_steps: int = 0
    next_id: int = 0
    elite_fitness: float | None = None
    solved: bool = False
    wall_clock_seconds: float = 0.0
    ranks: int = 1


class Run:
    """What surrounds the training loop and concerns all ranks: files, evolution, progress and the end.

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
        self.experience = experience
        self.progress = Progress(ranks=self.ranks.size, next_id=config.population.size)
        self.agents = found_population(config, algorithm)
        self.stopwatch = stopwatch
        self._context = Context(config.evolution, algorithm.networks)
        self._training_seconds = 0.0
        self._directory, generation = self._claim()
        self._trackers: Trackers | None = None
        self._bar: tqdm[Any] | None = None
        if generation is not None:
            self._restore(generation)
        self._before = self.progress.wall_clock_seconds
        self._began = time.perf_counter()

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def generation(self) -> int:
        """The generation that trains now, from 1."""
        return self.progress.generation + 1

    @property
    def finished(self) -> bool:
        """Whether the target is reached or the steps are used up; all ranks decide from the same numbers."""
        return self.progress.solved or self.progress.agent_steps >= self.config.training.max_steps

    def seed(self, purpose: str) -> int:
        """This rank's seed for one purpose in this generation."""
        return derive_seed(self.config.seed, generation=self.generation, rank=self.ranks.rank, purpose=purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """This rank's generator for one purpose in this generation."""
        rank, device = self.ranks.rank, self.ranks.device
        return torch_generator(self.config.seed, generation=self.generation, rank=rank, purpose=purpose, device=device)

    def __enter__(self) -> Self:
        if self.ranks.is_main:
            self._trackers = Trackers(self.config, self.path)
            total, done = self.config.training.max_steps, self.progress.agent_steps
            self._bar = tqdm(total=total, initial=done, unit="step", desc=self.path.name, dynamic_ncols=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ranks.is_main:
            return
        summary = {
            "solved": self.progress.solved,
            "best_fitness": self.progress.elite_fitness,
            "generations": self.progress.generation,
            "global_steps": self.progress.global_steps,
            "agent_steps": self.progress.agent_steps,
            "wall_clock_seconds": self._before + time.perf_counter() - self._began,
            "ranks": self.ranks.size,
            "ended": "finished" if kind is None else kind.__name__,
        }
        if self._bar is not None:
            self._bar.close()
        self._directory.write_summary(summary)
        if self._trackers is not None:
            self._trackers.finish(summary, self._directory.read("lineage.jsonl"))

    def steps(self) -> Iterator[int]:
        """The vector steps of one generation, shown on the bar."""
        started = time.perf_counter()
        each = self.config.environment.num_envs * self.placement.copies
        period = self.experience.period
        for step in range(-(-self.config.evolution.steps // (each * period)) * period):
            yield step
            if self._bar is not None:
                self._bar.update(each)
        self._training_seconds = time.perf_counter() - started

    def collect(self, population: Population) -> list[Agent]:
        """All trained agents, on every rank. Raises RuntimeError if replicas have drifted apart."""
        payload = encode_agents(population.to_agents())
        if not self.placement.is_sharded:
            self.ranks.agree(digest(payload), "trained agents")
            return population.agents
        parts = self.ranks.gather_bytes(payload, "the other ranks' trained agents")
        return [agent for part in parts for agent in decode_agents(part, "another rank's agents")]

    def judge(self, trained: list[Agent], fitness: NDArray[np.float64], evaluator: Evaluator) -> None:
        """Note each agent's fitness [P], keep the best agent there has been, and see whether the target is reached."""
        fitness = np.where(np.isfinite(fitness), fitness, np.nan)
        for agent, value in zip(trained, fitness, strict=True):
            agent.fitness = None if np.isnan(value) else float(value)
        best, progress, target = trained[elite(fitness)], self.progress, self.config.training.target_fitness
        confirmed: set[int] = set()
        while self.config.evaluation.confirmation_episodes and self._reaches(best, target) and best.id not in confirmed:
            alone = Population([best], self.algorithm, generator=self.generator("confirmation"))
            best.fitness = evaluator.confirm(alone, self.generation)
            confirmed.add(best.id)
            # What was the best of noisy means may now be behind another.
            best = trained[elite(np.array([np.nan if a.fitness is None else a.fitness for a in trained]))]
        if best.fitness is not None and (progress.elite_fitness is None or best.fitness > progress.elite_fitness):
            progress.elite_fitness = best.fitness
            if self.ranks.is_main:
                self._directory.write_elite(best)
        progress.solved = self._reaches(best, target)

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
        # Stacks order the agents anew each generation; curves keep the places that evolution gave them.
        place = {agent.id: number for number, agent in enumerate(self.agents)}
        order = np.argsort([place[agent.id] for agent in trained])
        trained = [trained[index] for index in order]
        row = generation_row(trained, counts.ordered(order), asdict(progress), seconds)
        self._directory.append("metrics.jsonl", [row])
        self._directory.append("lineage.jsonl", lineage_rows(trained, progress.generation))
        if self._trackers is not None:
            self._trackers.log(progress.global_steps, curves(row))
        if self._bar is not None:
            self._bar.n = progress.agent_steps
            shown = {"best": row["best_fitness"], "mean": row["mean_fitness"], "rate": row["env_steps_per_second"]}
            self._bar.set_postfix({name: round(value) for name, value in shown.items() if value is not None})

    def evolve(self, trained: list[Agent]) -> None:
        """Select and mutate on the main process and checkpoint; every other rank reloads the new agents."""
        payload = b""
        if self.ranks.is_main:
            rng = numpy_generator(self.config.seed, generation=self.progress.generation, rank=0, purpose="evolution")
            agents = evolve(trained, self._context, self.progress.next_id, rng)
            self.progress.next_id = max(self.progress.next_id, 1 + max(agent.id for agent in agents))
            payload = encode_agents(agents)
        self._checkpoint(payload)
        self.agents = self._reload(payload)
        self.ranks.agree(digest(encode_agents(self.agents)), "evolved agents")

    def _reaches(self, agent: Agent, target: float | None) -> bool:
        return target is not None and agent.fitness is not None and agent.fitness >= target

    def _checkpoint(self, agents: bytes) -> None:
        """Gather every rank's files in one place and make them a checkpoint by a rename."""
        generation, checkpoints = self.progress.generation, self._directory.checkpoints
        files = {f"replay-rank-{self.ranks.rank:03d}.safetensors": encode_tensors(*self.experience.state())}
        if self.ranks.is_main:
            files |= {"agents.safetensors": agents, "state.json": json.dumps(asdict(self.progress)).encode()}
        for name, payload in files.items():
            write_atomically(checkpoints.partial(generation) / name, payload)
        mine = {name: entry(payload) for name, payload in files.items()}
        everyones = self.ranks.gather_bytes(json.dumps(mine).encode(), "the other ranks' checkpoint files")
        if self.ranks.is_main:
            listed = {name: value for part in everyones for name, value in json.loads(part).items()}
            checkpoints.complete(generation, listed)
        self.ranks.barrier("the checkpoint")
        if self.ranks.leads_host and not checkpoints.path(generation).exists():
            # This host does not share the main process's file system: it keeps its own ranks' files.
            here = everyones[self.ranks.rank : self.ranks.rank + self.ranks.on_host]
            checkpoints.complete(generation, {name: value for part in here for name, value in json.loads(part).items()})

    def _reload(self, payload: bytes) -> list[Agent]:
        """The checkpoint's agents: from the file on ranks that can see it, else from the main process's bytes."""
        expected = self.ranks.broadcast_bytes(digest(payload).encode(), "the evolved agents' digest").decode()
        path = self._directory.checkpoints.path(self.progress.generation) / "agents.safetensors"
        if not self.ranks.is_main and path.is_file():
            payload = path.read_bytes()
        seen = self.ranks.gather(np.array([float(digest(payload) == expected)]), "who can see the checkpoint")
        if not seen.all():
            payload = self.ranks.broadcast_bytes(payload, "the evolved agents")
        return decode_agents(payload, str(path))

    def _claim(self) -> tuple[RunDirectory, int | None]:
        """Agree on the directory and the generation to resume from."""

        def claim() -> bytes:
            directory, generation = RunDirectory.claim(self.config)
            return json.dumps([str(directory.path), generation]).encode()

        path, generation = json.loads(self.ranks.from_main(claim, "the run directory"))
        return RunDirectory(Path(path), self.config.checkpoint.keep), generation

    def _restore(self, generation: int) -> None:
        """Take up the run after `generation`."""
        checkpoints = self._directory.checkpoints

        def read(name: str) -> bytes:
            return self.ranks.from_main(lambda: checkpoints.read(generation, name), f"{name} of the checkpoint")

        self.progress = Progress(**json.loads(read("state.json")))
        self.agents = decode_agents(read("agents.safetensors"), str(checkpoints.path(generation)))
        files = json.loads(
            self.ranks.from_main(lambda: json.dumps(checkpoints.files(generation)).encode(), "the checkpoint's files")
        )
        # A target that was reached may have been raised since.
        target, fitness = self.config.training.target_fitness, self.progress.elite_fitness
        reached = target is not None and fitness is not None and fitness >= target
        self.progress.solved = self.progress.solved and reached
        exact = self.progress.ranks == self.ranks.size and not self.config.environment.carry_over
        parts = [name for name in files if name.startswith("replay-rank-")]
        for name in parts[self.ranks.rank :: self.ranks.size]:
            self.experience.restore(*decode_tensors(checkpoints.read(generation, name)))
        self.progress.ranks = self.ranks.size
        if not exact and self.ranks.is_main:
            reason = "environments carry over" if self.config.environment.carry_over else "the number of ranks changed"
            warnings.warn(f"this resume is not bit-exact: {reason}", EvorlWarning, stacklevel=2)
