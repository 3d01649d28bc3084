"""Evaluation: the results of whole, fresh episodes played without exploration. Axes: P agents, E environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.fields import INFO, RETURN
from evorl.distributed import Placement
from evorl.envs import Environments
from evorl.envs.vector import for_evaluation
from evorl.population import Policy
from evorl.randomness import numpy_generator
from evorl.types import Agent

MAX_COPIES = 32
"""Environments of each agent that an evaluation steps at once."""
Purpose = Literal["generation", "confirmation", "measurement"]
"""The purpose of episodes: the fitness of all agents, who is the elite, or how good it is."""


@dataclass(frozen=True)
class EpisodeResults:
    """Hold what every agent came to in its episodes: returns, steps and reports, each [P, episodes]."""

    returns: NDArray[np.float64]
    steps: NDArray[np.float64]
    reports: Mapping[str, NDArray[np.float64]]
    """The numbers that the environment reported, by the keys of its info."""

    @classmethod
    def of(cls, values: NDArray[np.float64], keys: Sequence[str]) -> Self:
        """Take apart what `stacked` gives."""
        returns, steps, *reports = values
        return cls(returns, steps, dict(zip(keys, reports, strict=True)))

    def stacked(self) -> NDArray[np.float64]:
        """Return all values [2 + keys, P, episodes]."""
        return np.stack([self.returns, self.steps, *self.reports.values()])

    def terms(self) -> dict[str, NDArray[np.float64]]:
        """Return what fitness may be made of [P, episodes], by the names that the configuration gives it."""
        return {RETURN: self.returns, **{f"{INFO}{key}": values for key, values in self.reports.items()}}

    def fitness(self, weights: Mapping[str, float]) -> NDArray[np.float64]:
        """Return the weighted sum of terms [P, episodes]."""
        terms, total = self.terms(), np.zeros_like(self.returns)
        for name, weight in weights.items():
            total += weight * terms[name]
        return total


def reported_keys(weights: Mapping[str, float]) -> list[str]:
    """Return the keys of the environment's info that fitness needs."""
    return [name.removeprefix(INFO) for name in weights if name != RETURN]


def evaluate(
    policy: Policy,
    environments: Environments,
    seeds: Sequence[int],
    max_steps: int | None,
    keys: Sequence[str] = (),
) -> EpisodeResults:
    """Return the results [P, episodes] of one fresh episode from each seed with every agent, cut after `max_steps`.

    Every environment plays one episode at a time and each that was begun counts: taking the first to end would favour
    short ones. Reports are what the info of each episode's last step says of `keys`. Raises UserError where it says
    nothing.
    """
    width = environments.num_envs
    rounds = [np.zeros((2 + len(keys), environments.agents, 0))]
    for first in range(0, len(seeds), width):
        chosen = list(seeds[first : first + width])
        # The last round may have fewer episodes than environments; those left over repeat one, which is not counted.
        environments.reset(chosen + [chosen[-1]] * (width - len(chosen)))
        rounds.append(_one_episode_each(policy, environments, len(chosen), max_steps, keys)[..., : len(chosen)])
    return EpisodeResults.of(np.concatenate(rounds, axis=-1), keys)


def _one_episode_each(
    policy: Policy, environments: Environments, counted: int, max_steps: int | None, keys: Sequence[str]
) -> NDArray[np.float64]:
    """Return the stacked results of one episode in each environment [2 + keys, P, E]; those not `counted` are zero."""
    results = np.zeros((2 + len(keys), environments.agents, environments.num_envs))
    returns, steps = results[:2]
    state = policy.initial_state(environments.num_envs)
    playing = np.ones_like(returns, dtype=bool)
    playing[:, counted:] = False
    while playing.any():
        output, state = policy.act(environments.observation, environments.started, state, deterministic=True)
        transition = environments.step(output.action)
        returns += np.where(playing, transition.reward.cpu().numpy(), 0.0)
        steps += playing
        if not transition.all_valid:
            # Where an error cut an episode off, the one that follows counts in its place.
            cut_off = playing & ~transition.valid.cpu().numpy()
            returns[cut_off] = steps[cut_off] = 0.0
        played = playing
        playing = playing & ~(transition.terminated | transition.truncated).cpu().numpy()
        if max_steps is not None:
            playing &= steps < max_steps
        if keys and (ended := played & ~playing).any():
            results[2:, ended] = environments.reports(keys, ended)
    return results


class Evaluator:
    """Evaluates agents over all ranks. All agents play the same episodes, which cuts the noise of a comparison."""

    def __init__(self, config: AnyConfig, placement: Placement, algorithm: Algorithm) -> None:
        self._config = config
        self._placement = placement
        self._algorithm = algorithm
        self._settings = for_evaluation(config.environment)
        copy = 0 if placement.is_sharded else placement.ranks.rank
        self._mine = slice(copy, None, placement.copies)
        episodes = len(range(config.evaluation.episodes)[self._mine])
        self._environments = self._make(placement.local_size, episodes)
        self._few: dict[tuple[int, int], Environments] = {}
        self._weights = config.evolution.fitness
        self._keys = reported_keys(self._weights)
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all environments, as `Environments.close` does."""
        for environments in (self._environments, *self._few.values()):
            environments.close()

    def pop_steps(self) -> int:
        """Return the steps that all agents have taken in episodes since the last call, over all ranks."""
        steps, self._steps = self._steps, 0
        return steps

    def evaluate(self, policy: Policy, generation: int) -> EpisodeResults:
        """Return the results [P, episodes] of every agent on the generation's episodes, agents in the ranks' order."""
        seeds = self._seeds(generation, "generation", 0, self._config.evaluation.episodes)
        results = self._play(policy, self._environments, seeds[self._mine])
        everyones = self._gathered(results, len(seeds), self._placement.copies)
        if self._placement.is_sharded:
            return EpisodeResults.of(np.concatenate(list(everyones), axis=1), self._keys)
        return EpisodeResults.of(_interleaved(everyones, len(seeds)), self._keys)

    def remeasure(
        self, agents: Sequence[Agent], generation: int, purpose: Purpose, first: int, episodes: int
    ) -> NDArray[np.float64]:
        """Return the fitness [P, episodes] of one or two agents that every rank holds, played by all ranks together.

        They play the generation's episodes, or fresh ones for another purpose, from number `first` on.
        """
        ranks = self._placement.ranks
        seeds = self._seeds(generation, purpose, first, episodes)
        mine = seeds[ranks.rank :: ranks.size]
        width = max(1, min(len(mine), MAX_COPIES))
        environments = self._few.get((len(agents), width))
        if environments is None:
            environments = self._few[len(agents), width] = self._make(len(agents), width)
        generator = torch.Generator(device=ranks.device)  # Nothing is drawn: agents act without exploration.
        results = self._play(Policy(agents, self._algorithm, generator), environments, mine)
        everyones = _interleaved(self._gathered(results, len(seeds), ranks.size), len(seeds))
        return EpisodeResults.of(everyones, self._keys).fitness(self._weights)

    def _make(self, agents: int, episodes: int) -> Environments:
        columns = max(1, min(episodes, MAX_COPIES))
        return Environments(self._settings, agents, columns, self._placement.ranks.device, whole_games=True)

    def _play(self, policy: Policy, environments: Environments, seeds: Sequence[int]) -> EpisodeResults:
        return evaluate(policy, environments, seeds, self._config.evaluation.max_steps, self._keys)

    def _gathered(self, results: EpisodeResults, episodes: int, shares: int) -> NDArray[np.float64]:
        """Return every rank's stacked results [R, 2 + keys, P, most episodes of a rank], and count their steps.

        A rank with one episode fewer ends in NaN.
        """
        local = results.stacked()
        padded = np.full((*local.shape[:2], -(-episodes // shares)), np.nan)
        padded[..., : local.shape[2]] = local
        everyones = self._placement.ranks.gather(padded, "the other ranks' evaluation")
        self._steps += int(np.nansum(everyones[:, 1]))
        return everyones

    def _seeds(self, generation: int, purpose: Purpose, first: int, episodes: int) -> list[int]:
        rng = numpy_generator(self._config.seed, generation=generation, rank=0, purpose=f"evaluation {purpose}")
        return [int(seed) for seed in rng.integers(2**31, size=first + episodes)[first:]]


def _interleaved(everyones: NDArray[np.float64], episodes: int) -> NDArray[np.float64]:
    """Put the shares [R, ..., N] of ranks that took every R-th episode in the episodes' order [..., episodes]."""
    return np.moveaxis(everyones, 0, -1).reshape(*everyones.shape[1:-1], -1)[..., :episodes]
