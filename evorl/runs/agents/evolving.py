"""Evolution between the generations of a run, on its ranks: selection, mutation and the user's strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.distributed import Ranks
from evorl.evolution import Context, evolve
from evorl.evolution.strategy import Tuner, mutations_of
from evorl.runs.output.metrics import Counts
from evorl.runs.reading.lineage import stage_of
from evorl.runs.storage.json_lines import JsonLines
from evorl.runs.storage.progress import Progress
from evorl.seeding import derive_seed, numpy_generator
from evorl.types import Agent, UserError

LARGE_REWARD = 1e3
"""Mean rewards of a step above this may be what makes agents diverge."""


class Evolver:
    """Makes the agents of the next generation on the main process; its UserErrors are raised on all ranks."""

    tuner: Tuner | None
    """The user's strategy, on the main process of a run that has one."""

    def __init__(self, config: AnyConfig, algorithm: Algorithm, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._context = Context(config.evolution, algorithm.networks, mutations_of(config.evolution))
        self.tuner = None
        self._on_main(self._make_tuner)

    def _make_tuner(self) -> None:
        if self._config.evolution.strategy is not None:
            seed = derive_seed(self._config.seed, generation=0, rank=0, purpose="strategy")
            self.tuner = Tuner(self._config.evolution, seed)

    def catch_up(self, lineage: JsonLines, generation: int, agents: Sequence[Agent]) -> bool:
        """Repeat all earlier calls of the strategy of a run that resumes with `agents` after a `generation`.

        False if the strategy of the main process chose otherwise than before.
        """
        repeated = [True]

        def repeat() -> None:
            if self.tuner is not None:
                stages = (stage_of(row, lineage.path) for row in lineage.rows())
                stages = (stage for stage in stages if stage.generation <= generation)
                generations = (list(members) for _, members in groupby(stages, key=attrgetter("generation")))
                repeated[0] = self.tuner.catch_up(generations, agents)

        self._on_main(repeat)
        return repeated[0]

    def evolve(self, trained: list[Agent], progress: Progress, generation: int, reward: float) -> list[Agent]:
        """The agents of the next generation on the main process, and an empty list on other ranks.

        `reward` is the size of the mean reward of a step, for the advice on agents that are lost.

        Raises UserError on all ranks if a fault has stopped every agent.
        """
        if all(agent.fault for agent in trained):
            faults = "; ".join(f"agent {agent.id}: {agent.fault}" for agent in trained[:4])
            raise UserError(
                f"all agents were lost in generation {generation} ({faults}); {remedy(self._config, reward)}",
                reported_elsewhere=not self._ranks.is_main,
            )
        evolved: list[Agent] = []
        self._on_main(lambda: evolved.extend(self._evolved(trained, progress, generation)))
        return evolved

    def _evolved(self, trained: list[Agent], progress: Progress, generation: int) -> list[Agent]:
        """The agents of the next generation, on the main process."""
        elite = progress.elite
        archive = elite.competing(self._config, generation)
        rng = numpy_generator(self._config.seed, generation=generation, rank=0, purpose="evolution")
        if self.tuner is not None:
            self.tuner.tell(trained)
        evolved = evolve(
            trained,
            self._context,
            progress.next_id,
            rng,
            archive,
            generation,
            elite.generation,
            selects=progress.selection_began is not None,
        )
        if self.tuner is not None:
            self.tuner.settle(evolved)
        progress.next_id = max(progress.next_id, 1 + max(agent.id for agent in evolved))
        return evolved

    def _on_main(self, work: Callable[[], None]) -> None:
        """On the main process, do work that may call the user's strategy; its UserError is raised on all ranks."""

        def done() -> bytes:
            work()
            return b""

        if self._config.evolution.strategy is not None:
            self._ranks.from_main(done, "the main process's evolution.strategy")
        elif self._ranks.is_main:
            work()


def mean_reward(counts: Counts) -> float:
    """Return the size of the mean reward of a step: that of the agent with the largest, or 0 if no episode counts."""
    sizes = np.abs(counts.train_return / counts.train_length)
    return float(np.max(sizes[~np.isnan(sizes)], initial=0.0))


def remedy(config: AnyConfig, reward: float) -> str:
    """Return advice for a run whose agents are all lost, where steps gave a mean `reward` of this size."""
    algorithm = config.algorithm
    if reward > LARGE_REWARD and algorithm.reward_clip is None:
        return f"rewards average {reward:.2g} a step: scale them to about 1, or set algorithm.reward_clip"
    clips = "" if algorithm.max_grad_norm is not None else ", or set algorithm.max_grad_norm"
    return f"lower algorithm.learning_rate{clips}"
