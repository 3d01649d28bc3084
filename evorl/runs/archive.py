"""The fitness of a generation's agents, and the elite, which the best of them challenges.

Axes: P agents, N episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evorl.config import AnyConfig
from evorl.population.evaluation import EpisodeResults, Evaluator, Purpose
from evorl.runs.elite import Elite, Play, Score
from evorl.system.formats import decode_agents, encode_agents
from evorl.types import Agent


def assign_fitness(agents: Sequence[Agent], fitness: NDArray[np.float64]) -> None:
    """Give each agent the mean of its episodes' `fitness` [P, N], or None if a fault kept it from learning."""
    for agent, row in zip(agents, fitness, strict=True):
        agent.fitness = float(row.mean()) if np.isfinite(row).all() and agent.fault is None else None


class Archive:
    """The elite as an agent, which each generation's best challenges and which competes as a parent.

    `elite` has its score, which a challenge updates; `payload` is its file, empty before there is one. `parents` holds
    the elite, with its mean on the last generation's episodes as its fitness. It is empty where that
    generation's best has won, since that is in the population. `evaluation_steps` are those of all episodes that the
    last generation and its challenge took.
    """

    def __init__(self, config: AnyConfig, elite: Elite, payload: bytes) -> None:
        self.elite = elite
        self.payload = payload
        self.parents: list[Agent] = []
        self.evaluation_steps = 0
        self._settings = config.evaluation
        self._weights = config.evolution.fitness
        self._competes_for = config.evolution.selection.archive
        self._target = config.training.target_fitness

    def challenge(
        self, agents: Sequence[Agent], results: EpisodeResults, evaluator: Evaluator, generation: int
    ) -> bool:
        """Give agents the fitness of `results` [P, N], and let the best challenge the elite.

        Return whether the target is reached.

        The elite plays the generation's episodes too; where it is beaten there, both play further ones. The target is
        tested on fresh episodes of who is then the elite.
        """
        fitness = results.fitness(self._weights)
        assign_fitness(agents, fitness)
        solved = self._challenge(agents, fitness, evaluator, generation)
        self.evaluation_steps = evaluator.pop_steps()
        return solved

    def competing(self, generation: int) -> list[Agent]:
        """Return the elite as a parent for the agents of the next generation, unless it has been for long enough."""
        age = generation - (self.elite.generation or 0)
        return self.parents if age <= self._competes_for else []

    def _challenge(
        self, agents: Sequence[Agent], fitness: NDArray[np.float64], evaluator: Evaluator, generation: int
    ) -> bool:
        place = max(range(len(agents)), key=lambda index: _by_fitness(agents[index]))
        best, elite = agents[place], self.elite
        seems_reached = self._is_target(best.fitness) or self._is_target(elite.score.mean if elite.score else None)
        if self._beats_elite(best, fitness[place], evaluator, generation):
            # With the mean that is known of it by now, and not with that of the episodes that chose it.
            known = replace(best, fitness=elite.score.mean if elite.score else None)
            self.payload, self.parents = encode_agents([known]), []
        if self._target is None:
            return False
        episodes = self._settings.confirmation_episodes
        play = _play(evaluator, self.parents or [best], generation, "target") if episodes else None
        return elite.reaches(self._target, self._settings.error, seems_reached, play, episodes)

    def _is_target(self, fitness: float | None) -> bool:
        return self._target is not None and fitness is not None and fitness >= self._target

    def _beats_elite(self, best: Agent, fitness: NDArray[np.float64], evaluator: Evaluator, generation: int) -> bool:
        """Return whether the best agent, with `fitness` [N], wins against the elite, which is then in `parents`."""
        again = None
        self.parents = decode_agents(self.payload, "the elite") if self.payload else []
        for agent in self.parents:
            again = _play(evaluator, [agent], generation, "generation")(0, self._settings.episodes)[0]
            agent.fitness = float(again.mean())
        if best.fitness is None:
            if again is not None:
                self.elite.note(Score.of(again))
            return False
        confirms = self._settings.confirmation_episodes
        play = _play(evaluator, [best, *self.parents], generation, "confirmation") if confirms else None
        return self.elite.challenge(fitness, again, play, confirms, generation)


def _play(evaluator: Evaluator, agents: Sequence[Agent], generation: int, purpose: Purpose) -> Play:
    return partial(evaluator.remeasure, agents, generation, purpose)


def _by_fitness(agent: Agent) -> tuple[bool, float, int]:
    """Return what orders agents by their fitness; of equals the newest comes last."""
    return agent.fitness is not None, agent.fitness or 0.0, agent.id
