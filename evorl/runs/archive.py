"""Fitness assignment, and the archive: the elite, which the best agent of each generation challenges.

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
    """Set each agent's fitness to the mean over its episodes of `fitness` [P, N].

    It is None if an episode's value is not finite or a fault stopped the agent's training.
    """
    for agent, row in zip(agents, fitness, strict=True):
        agent.fitness = float(row.mean()) if np.isfinite(row).all() and agent.fault is None else None


class Archive:
    """The elite: challenged by the best agent of each generation, and a candidate parent in selection.

    `elite` holds its score, which a challenge updates; `payload` is its file, empty before there is one. `parents`
    holds the elite, with its mean on the last generation's episodes as its fitness. It is empty if that generation's
    best agent won, since that agent is in the population. `evaluation_steps` counts the environment steps of all
    evaluation episodes of the last generation, including its challenge.
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
        """Assign fitness from `results` [P, N], and let the best agent challenge the elite.

        The elite plays the generation's episodes too. If it loses on them, both play fresh episodes. The winner is
        then measured, and tested for the target, on separate episodes.

        Returns True if the target is reached.
        """
        fitness = results.fitness(self._weights)
        assign_fitness(agents, fitness)
        self.elite.see(fitness)
        solved = self._challenge(agents, fitness, evaluator, generation)
        self.evaluation_steps = evaluator.pop_steps()
        return solved

    def competing(self, generation: int) -> list[Agent]:
        """Return the elite as a candidate parent of the next generation, or nothing.

        It stops competing `evolution.selection.archive` generations after it won.
        """
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
        # Play all episodes when the target is tested: stopping after a bad start would bias those means low.
        played = elite.measure(play, confirms if seems_reached else settings.episodes, confirms)
        solved = self._target is not None and elite.reaches(
            self._target, settings.error, seems_reached, play, confirms, played
        )
        if won and elite.score:
            # Store the measured mean: the mean over the episodes that selected it is biased upwards.
            self.payload = encode_agents([replace(best, fitness=elite.score.mean)])
        return solved

    def _beats_elite(self, best: Agent, fitness: NDArray[np.float64], evaluator: Evaluator, generation: int) -> bool:
        """Load the elite into `parents`, and return True if the best agent, with `fitness` [N], beats it."""
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
    """Return the sort key of an agent: by fitness, and among equals by id, so that the newest comes last."""
    return agent.fitness is not None, agent.fitness or 0.0, agent.id
