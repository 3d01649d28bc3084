"""Evaluation on complete, fresh episodes without exploration. Axes: P agents, E environments."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.fields import INFO, RATING, RETURN
from evorl.distributed import Placement
from evorl.envs import SteppedEnvironments, make_environments
from evorl.envs.games.players import OpponentFactory
from evorl.envs.games.vector import RESULT
from evorl.envs.tensor.sources import width
from evorl.envs.vector import for_evaluation
from evorl.population import Policy
from evorl.seeding import numpy_generator
from evorl.system.closing import Closeable
from evorl.system.devices import is_host
from evorl.system.signals import raise_if_signalled
from evorl.types.agents import Agent
from evorl.types.outcomes import EvorlWarning
from evorl.types.tensors import Observation

MAX_COPIES = 32
"""Maximum number of environments per agent that an evaluation steps in parallel."""
ENOUGH_REPEATS = 7
"""Episodes identical to one that began together with them with another seed, from which all are taken to repeat."""
ENDLESS = 30_000
"""Steps after which a warning names an episode without a limit."""
READ_EVERY = 16
"""Steps after which a GPU is asked whether any evaluation episode goes on."""
HASH = 0x9E3779B97F4A7C15 - 2**64
"""An odd multiplier of hashes, 2^64 divided by the golden ratio."""
Purpose = Literal["generation", "confirmation", "measurement", "comparison"]
"""The purpose of episodes: the fitness of all agents, the choice of the elite, an estimate of its performance, or the
comparison of evolution with none."""


@dataclass(frozen=True)
class EpisodeResults:
    """Results of every agent's episodes: returns, steps, checksums and reported values, each [P, episodes]."""

    returns: NDArray[np.float64]
    steps: NDArray[np.float64]
    checksums: NDArray[np.float64]
    """Checksums of the first and the last observation, the rewards and the length of an episode."""
    reports: Mapping[str, NDArray[np.float64]]
    """Values reported by the environment, by info key."""

    @classmethod
    def of(cls, values: NDArray[np.float64], keys: Sequence[str]) -> Self:
        """Unpack the output of `stacked`."""
        returns, steps, checksums, *reports = values
        return cls(returns, steps, checksums, dict(zip(keys, reports, strict=True)))

    def stacked(self) -> NDArray[np.float64]:
        """All values in one array [3 + keys, P, episodes], to be gathered in one collective."""
        return np.stack([self.returns, self.steps, self.checksums, *self.reports.values()])

    def repeat_each_other(self, width: int) -> bool | None:
        """Return True if the episodes of every `width` copies that began together are identical, False if any differ.

        None if none differ and fewer than ENOUGH_REPEATS repeat another one: a few may be identical by chance.
        """
        repeats = 0
        for first in range(0, self.checksums.shape[1], width):
            together = self.checksums[:, first : first + width]
            if (together != together[:, :1]).any():
                return False
            repeats += together.shape[1] - 1
        return True if repeats >= ENOUGH_REPEATS else None

    def terms(self) -> dict[str, NDArray[np.float64]]:
        """The possible fitness terms [P, episodes] by their names in the configuration."""
        return {RETURN: self.returns, **{f"{INFO}{key}": values for key, values in self.reports.items()}}

    def fitness(self, weights: Mapping[str, float]) -> NDArray[np.float64]:
        """Fitness [P, episodes], the weighted sum of terms; of a game that is rated, the result of each episode."""
        if RATING in weights:
            return self.reports[RESULT]
        terms = self.terms()
        return np.asarray(sum(weight * terms[name] for name, weight in weights.items()))


def reported_keys(weights: Mapping[str, float]) -> list[str]:
    """The info keys that the fitness uses."""
    if RATING in weights:
        return [RESULT]
    return [name.removeprefix(INFO) for name in weights if name != RETURN]


def evaluate(
    policy: Policy,
    environments: SteppedEnvironments,
    seeds: Sequence[int],
    max_steps: int | None,
    keys: Sequence[str] = (),
) -> EpisodeResults:
    """Play one fresh episode per seed with every agent, cut after `max_steps`; results are [P, episodes].

    Each environment plays one episode at a time, and every started episode counts: taking the first ones to end would
    be biased towards short episodes. Reports are the values of `keys` in the info of each episode's last step. Raises
    UserError if one is missing.
    """
    width = environments.num_envs
    rounds = [np.zeros((3 + len(keys), environments.agents, 0))]
    for first in range(0, len(seeds), width):
        chosen = list(seeds[first : first + width])
        # The last round may have fewer episodes than environments; surplus environments repeat one that is not counted.
        environments.reset(chosen + [chosen[-1]] * (width - len(chosen)))
        rounds.append(_one_episode_each(policy, environments, len(chosen), max_steps, keys)[..., : len(chosen)])
    environments.check()
    return EpisodeResults.of(np.concatenate(rounds, axis=-1), keys)


def _one_episode_each(
    policy: Policy, environments: SteppedEnvironments, episodes: int, max_steps: int | None, keys: Sequence[str]
) -> NDArray[np.float64]:
    """Stacked results [3 + keys, P, E] of one episode per environment; columns beyond `episodes` are zero.

    They are computed on the device of the environments. A GPU is asked only now and then whether any episode goes on.
    """
    device, shape = environments.device, (environments.agents, environments.num_envs)
    on_host = is_host(device)
    returns, steps, weighted_rewards = torch.zeros(3, *shape, dtype=torch.float64, device=device)
    reports = torch.zeros(len(keys), *shape, dtype=torch.float64, device=device)
    playing = torch.ones(shape, dtype=torch.bool, device=device)
    playing[:, episodes:] = False
    hashes = _hashed(torch.zeros(shape, dtype=torch.int64, device=device), environments.observation, playing)
    state = policy.initial_state(environments.num_envs)
    taken = 0
    while (not on_host and taken % READ_EVERY) or bool(playing.any()):
        raise_if_signalled()
        output, state = policy.act(environments.observation, environments.started, state, deterministic=True)
        transition = environments.step(output.action)
        reward = transition.reward.where(playing, 0.0)
        returns += reward
        weighted_rewards += reward / (1 + taken)
        steps += playing
        taken += 1
        if taken % ENDLESS == 0 and max_steps is None and float(steps.max()) >= ENDLESS:
            environments.warn_of_endless(ENDLESS)
        played = playing
        playing = playing & ~(transition.terminated | transition.truncated)
        if max_steps is not None:
            playing &= steps < max_steps
        ended = played & ~playing
        if not on_host or bool(ended.any()):
            hashes = _hashed(hashes, transition.next_observation, ended)
            if keys:
                reports = torch.where(ended, environments.reports(keys, ended).to(device), reports)
    sums = torch.stack((returns, steps, weighted_rewards)).cpu().numpy()
    checksums = np.zeros(shape)
    for episode, hashed in np.ndenumerate(hashes.cpu().numpy()):
        checksums[episode] = zlib.crc32(np.append(sums[:, *episode], hashed).tobytes())
    return np.concatenate([sums[:2], checksums[None], reports.cpu().numpy()])


def _hashed(hashes: Tensor, observation: Observation, chosen: Tensor) -> Tensor:
    """Hashes [P, E] of what an episode has shown, with the observations of the `chosen` environments [P, E] added."""
    for part in observation.values():
        values = part.reshape(*part.shape[:2], -1)
        bits = (values.view(torch.int32) if values.dtype == torch.float32 else values).to(torch.int64)
        # Sums of integers wrap around and are the same in any order.
        factors = torch.arange(1, bits.shape[2] + 1, device=bits.device) * HASH
        hashes = torch.where(chosen, hashes * HASH + (bits * factors).sum(2), hashes)
    return hashes


class Evaluator(Closeable):
    """Evaluates agents across all ranks. All agents play the same episodes, which reduces comparison noise."""

    def __init__(self, config: AnyConfig, placement: Placement, algorithm: Algorithm) -> None:
        self._config = config
        self._placement = placement
        self.algorithm = algorithm
        self._settings = for_evaluation(config.evaluation_environment)
        copy = placement.copy
        self._mine = slice(copy, None, placement.copies)
        self._environments: dict[tuple[int, int], SteppedEnvironments] = {}
        """By the numbers of agents and of copies for each of them."""
        self._seat: OpponentFactory | None = None
        if config.evaluation.fitness == "evaluation":
            self._environments_for(placement.local_size, len(range(config.evaluation.episodes)[self._mine]))
        self._weights = config.evolution.fitness
        self._keys = reported_keys(self._weights)
        self._steps = 0
        self.repeats: bool | None = None
        """True if many episodes that began together in several copies, with different seeds, were identical, and none
        has ever differed; False once any differed; None before either. Returns that repeat are not independent."""

    def set_opponents(self, seat: OpponentFactory) -> None:
        """Let the opponents that `seat` constructs play the other seat of a game; until then it plays at random."""
        if self._seat is not seat:
            self._seat = seat
            for environments in self._environments.values():
                environments.set_opponents(seat(environments.agents * environments.num_envs))

    def close(self) -> None:
        """Close all environments, as `Environments.close` does."""
        for environments in self._environments.values():
            environments.close()

    def pop_steps(self) -> int:
        """Steps of all agents in evaluation episodes since the last call, over all ranks."""
        steps, self._steps = self._steps, 0
        return steps

    def evaluate(self, policy: Policy, generation: int, episodes: int | None = None) -> EpisodeResults:
        """Play the generation's episodes with every agent; results [P, episodes] have agents in rank order.

        They are the first `episodes` of the generation; None is `evaluation.episodes`.
        """
        episodes = episodes or self._config.evaluation.episodes
        seeds = self._seeds(generation, "generation", 0, episodes)
        mine = seeds[self._mine]
        environments = self._environments_for(self._placement.local_size, len(mine))
        results = evaluate(policy, environments, mine, self._config.evaluation.max_steps, self._keys)
        everyones = self._gathered(results, len(seeds), self._placement.copies)
        sharded = self._placement.is_sharded
        values = np.concatenate(list(everyones), axis=1) if sharded else _interleaved(everyones, len(seeds))
        results = EpisodeResults.of(values, self._keys)
        self._compare(results, self._placement.local_size, self._placement.copies)
        return results

    def remeasure(
        self, agents: Sequence[Agent], generation: int, purpose: Purpose, first: int, episodes: int
    ) -> NDArray[np.float64]:
        """Fitness [P, episodes] of some agents that every rank holds; all ranks share the episodes.

        The agents play the generation's episodes, or fresh ones for another purpose, starting at episode number
        `first`. Fresh episodes are independent: if those of several copies repeat each other, one copy of the main
        process plays them one after another.
        """
        ranks = self._placement.ranks
        seeds = self._seeds(generation, purpose, first, episodes)
        in_turn = bool(self.repeats) and purpose != "generation"
        mine = seeds if in_turn else seeds[ranks.rank :: ranks.size]
        environments = self._environments_for(len(agents), 1 if in_turn else len(mine))
        generator = torch.Generator(device=ranks.device)  # Never sampled from: agents act without exploration.
        policy = Policy(agents, self.algorithm, generator)
        results = evaluate(policy, environments, mine, self._config.evaluation.max_steps, self._keys)
        everyones = self._gathered(results, len(seeds), 1 if in_turn else ranks.size)
        results = EpisodeResults.of(everyones[0] if in_turn else _interleaved(everyones, len(seeds)), self._keys)
        if not in_turn:
            self._compare(results, len(agents), ranks.size)
        return results.fitness(self._weights)

    def _compare(self, results: EpisodeResults, agents: int, shares: int) -> None:
        """Note whether episodes repeat each other, which each of `shares` ranks has played with so many agents."""
        # The same on all ranks, whose numbers of episodes may differ.
        together = shares * self._copies_for(agents, MAX_COPIES)
        if self.repeats is False or (repeats := results.repeat_each_other(together)) is None:
            return
        if repeats and self.repeats is None and self._placement.ranks.is_main:
            warnings.warn(
                f"environment.id: evaluation episodes of {self._settings.id} with different seeds were identical: "
                "either it is deterministic, or `reset` ignores its seed and copies repeat each other, also in "
                "training; the best agent is now measured in one copy, one episode after another",
                EvorlWarning,
                stacklevel=3,
            )
        self.repeats = repeats

    def _environments_for(self, agents: int, episodes: int) -> SteppedEnvironments:
        """Environments in which each of so many agents plays its episodes, in at most MAX_COPIES copies."""
        key = agents, self._copies_for(agents, max(1, min(episodes, MAX_COPIES)))
        if key not in self._environments:
            made = make_environments(self._settings, *key, self._placement.ranks.device, whole_games=True)
            if self._seat is not None:
                made.set_opponents(self._seat(made.agents * made.num_envs))
            self._environments[key] = made
        return self._environments[key]

    def _copies_for(self, agents: int, wanted: int) -> int:
        """The copies in which each of so many agents plays at once: as `wanted`, or fewer if a simulator has fewer."""
        return width(self._settings, agents, wanted, self._placement.ranks.device)

    def _gathered(self, results: EpisodeResults, episodes: int, shares: int) -> NDArray[np.float64]:
        """Gather all ranks' stacked results [R, 3 + keys, P, most episodes of a rank], and count their steps.

        A rank with one episode fewer is padded with NaN.
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
    """Interleave the results [R, ..., N] of ranks that took every R-th episode into episode order [..., episodes]."""
    return np.moveaxis(everyones, 0, -1).reshape(*everyones.shape[1:-1], -1)[..., :episodes]
