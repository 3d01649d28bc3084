"""How good agents are: returns of whole, fresh episodes played without exploration. Axes: P agents, E environments."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evorl.config import AnyConfig, Environment
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
from evorl.population import Population
from evorl.randomness import derive_seed

MOST_COPIES = 16
"""Environments of each agent that an evaluation steps at once."""


def evaluate(
    population: Population, environments: Environments, episodes: int, seed: int, max_steps: int | None
) -> NDArray[np.float64]:
    """Returns [P, episodes] of as many fresh episodes of each agent, cut after `max_steps`.

    Every environment plays one episode at a time and each that was begun counts: taking the first to end would favour
    short ones.
    """
    rounds: list[NDArray[np.float64]] = []
    while sum(played.shape[1] for played in rounds) < episodes:
        # Copy i of a vector environment takes seed + i, so rounds lie a whole set of copies apart.
        environments.reset(seed + len(rounds) * environments.agents * environments.num_envs)
        rounds.append(_one_episode_each(population, environments, max_steps))
    return np.concatenate(rounds, axis=1)[:, :episodes] if rounds else np.zeros((environments.agents, 0))


def _one_episode_each(population: Population, environments: Environments, max_steps: int | None) -> NDArray[np.float64]:
    returns = np.zeros((environments.agents, environments.num_envs))
    memory = population.memory(environments.num_envs)
    playing = np.ones_like(returns, dtype=bool)
    steps = np.zeros_like(returns)
    while playing.any():
        transition = environments.step(population.best(environments.observation, memory)["action"])
        returns += np.where(playing, transition.reward.cpu().numpy(), 0.0)
        steps += 1
        if not transition.all_valid:
            # Where an error cut an episode off, the one that follows counts in its place.
            cut_off = playing & ~transition.valid.cpu().numpy()
            returns[cut_off] = steps[cut_off] = 0.0
        playing &= ~(transition.terminated | transition.truncated).cpu().numpy()
        if max_steps is not None:
            playing &= steps < max_steps
    return returns


def share_of_episodes(episodes: int, ranks: int, rank: int) -> int:
    """How many of the episodes this rank plays; shares differ by one at most."""
    return episodes // ranks + (rank < episodes % ranks)


def whole_games(settings: Environment) -> Environment:
    """The environment as it is evaluated: a lost life ends nothing."""
    return settings.model_copy(update={"life_loss_ends": False})


class Evaluator:
    """Evaluates agents over all ranks, each rank on seeds of its own."""

    def __init__(self, config: AnyConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        ranks = placement.ranks
        copy = 0 if placement.is_sharded else ranks.rank
        self._episodes = share_of_episodes(config.evaluation.episodes, placement.copies, copy)
        columns = max(1, min(self._episodes, MOST_COPIES))
        self._environments = Environments(whole_games(config.environment), placement.local_size, columns, ranks.device)

    def fitness(self, population: Population, generation: int) -> NDArray[np.float64]:
        """The mean return [P] of every agent over all ranks' episodes."""
        seed = self._seed(generation, "evaluation")
        returns = evaluate(population, self._environments, self._episodes, seed, self._config.evaluation.max_steps)
        counts = np.full(len(returns), float(returns.shape[1]))
        sums, counts = self._placement.total(np.stack([returns.sum(1), counts]), "the other ranks' evaluation")
        return np.asarray(sums / counts)

    def confirm(self, population: Population, generation: int) -> float:
        """The mean return of one agent, which every rank holds, over further episodes of all ranks."""
        ranks: Ranks = self._placement.ranks
        episodes = share_of_episodes(self._config.evaluation.confirmation_episodes, ranks.size, ranks.rank)
        columns = max(1, min(episodes, MOST_COPIES))
        environments = Environments(whole_games(self._config.environment), 1, columns, ranks.device)
        seed = self._seed(generation, "confirmation")
        returns = evaluate(population, environments, episodes, seed, self._config.evaluation.max_steps)
        environments.close()
        sums = ranks.gather(np.array([returns.sum(), float(returns.size)]), "the other ranks' evaluation").sum(0)
        return float(sums[0] / sums[1])

    def _seed(self, generation: int, purpose: str) -> int:
        rank = self._placement.ranks.rank
        return derive_seed(self._config.seed, generation=generation, rank=rank, purpose=purpose)
