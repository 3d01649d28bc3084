"""Evolution between the generations of a run, on its ranks: selection and mutation."""

from __future__ import annotations

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.distributed import Ranks
from evorl.evolution import Context, evolve
from evorl.runs.storage.progress import Progress
from evorl.seeding import numpy_generator
from evorl.types import Agent, UserError

REMEDY = "lower algorithm.learning_rate, scale rewards to about 1, or set algorithm.reward_clip or max_grad_norm"


class Evolver:
    """Makes the agents of the next generation on the main process."""

    def __init__(self, config: AnyConfig, algorithm: Algorithm, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._context = Context(config.evolution, algorithm.networks)

    def evolve(self, trained: list[Agent], progress: Progress, generation: int) -> list[Agent]:
        """The agents of the next generation on the main process, and an empty list on other ranks.

        Raises UserError on all ranks if a fault has stopped every agent.
        """
        if all(agent.fault for agent in trained):
            faults = "; ".join(f"agent {agent.id}: {agent.fault}" for agent in trained[:4])
            raise UserError(
                f"all agents were lost in generation {generation} ({faults}); {REMEDY}",
                reported_elsewhere=not self._ranks.is_main,
            )
        return self._evolved(trained, progress, generation) if self._ranks.is_main else []

    def _evolved(self, trained: list[Agent], progress: Progress, generation: int) -> list[Agent]:
        elite = progress.elite
        archive = elite.competing(self._config, generation)
        rng = numpy_generator(self._config.seed, generation=generation, rank=0, purpose="evolution")
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
        progress.next_id = max(progress.next_id, 1 + max(agent.id for agent in evolved))
        return evolved
