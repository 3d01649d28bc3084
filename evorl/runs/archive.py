"""The fitness of a generation's agents, and the elite, which the best of them challenges.

Axes: P agents, N episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evorl.config import AnyConfig
from evorl.population.evaluation import EpisodeResults, Evaluator, Purpose
from evorl.runs.elite import Elite, Play, Returns
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

        The elite plays the generation's episodes too; where it is beaten there, both play further ones. Who is then the
        elite is measured, and tested for the target, on episodes of its own.
        """
        fitness = results.fitness(self._weights)
        assign_fitness(agents, fitness)
        self.elite.see(fitness)
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
        best, elite, settings = agents[place], self.elite, self._settings
        won = self._beats_elite(best, fitness[place], evaluator, generation)
        if won:
            self.parents = []
        elif not self.parents:
            return False
        (agent,) = self.parents or [best]
        seems_reached = self._target is not None and agent.fitness is not None and agent.fitness >= self._target
        confirms = settings.confirmation_episodes
        play = self._play(evaluator, [agent], generation, "measurement") if confirms else None
        # All at once where the target is tested: to stop where the first ones are bad would keep those means low.
        played = elite.measure(play, confirms if seems_reached else settings.episodes, confirms)
        solved = self._target is not None and elite.reaches(
            self._target, settings.error, seems_reached, play, confirms, played
        )
        if won and elite.score:
            # With the mean that is known of it by now, and not with that of the episodes that chose it.
            self.payload = encode_agents([replace(best, fitness=elite.score.mean)])
        return solved

    def _beats_elite(self, best: Agent, fitness: NDArray[np.float64], evaluator: Evaluator, generation: int) -> bool:
        """Return whether the best agent, with `fitness` [N], wins against the elite, which is then in `parents`."""
        again = None
        self.parents = decode_agents(self.payload, "the elite") if self.payload else []
        for agent in self.parents:
            again = self._play(evaluator, [agent], generation, "generation")(0, self._settings.episodes)[0]
            agent.fitness = float(again.mean())
        if best.fitness is None:
            return False
        confirms = self._settings.confirmation_episodes
        play = self._play(evaluator, [best, *self.parents], generation, "confirmation") if confirms else None
        return self.elite.challenge(fitness, again, play, confirms, generation)

    def _play(self, evaluator: Evaluator, agents: Sequence[Agent], generation: int, purpose: Purpose) -> Play:
        def play(first: int, episodes: int) -> Returns:
            returns = evaluator.remeasure(agents, generation, purpose, first, episodes)
            self.elite.see(returns)
            return returns

        return play


def _by_fitness(agent: Agent) -> tuple[bool, float, int]:
    """Return what orders agents by their fitness; of equals the newest comes last."""
    return agent.fitness is not None, agent.fitness or 0.0, agent.id
