"""Running statistics of observations, rewards and advantages, over the ranks that hold the same agents.

Axes: T steps, P agents, E environments, N samples, D components per sample; U updates, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.system.formats import check_tensors, load_like
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent, RewardStats
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

Array = NDArray[np.float64]

Gather = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""All-gather [...] -> [R, ...] over the ranks that hold the same agents; R = 1 where agents are not replicated."""


class Moments(NamedTuple):
    """Sample count [P], mean [P, D] and (population) variance [P, D]."""

    number: Array
    mean: Array
    variance: Array

    @classmethod
    def of(cls, samples: Tensor, weight: Tensor) -> Moments:
        """Moments of samples [P, N, D], with weight [P, N] 1 to include a sample and 0 to exclude it.

        They are computed where the samples are, so that only the moments leave a GPU.
        """
        samples, weight = samples.double(), weight.double()
        count = weight.sum(1)
        shares = (weight / count.clamp(min=1)[:, None])[..., None]
        mean = (samples * shares).sum(1)
        variance = ((samples - mean[:, None]).square() * shares).sum(1)
        return cls.unpacked(torch.cat([count[:, None], mean, variance], 1).cpu().numpy())

    def over_ranks(self, gather: Gather) -> Moments:
        """Moments of the samples of all ranks reached by `gather`."""
        return reduce(Moments.merged, (self.unpacked(packed) for packed in gather(self.packed())))

    def merged(self, other: Moments) -> Moments:
        """Moments of both sample sets together (Chan, Golub & LeVeque 1983)."""
        count = self.number + other.number
        share = (other.number / np.maximum(count, 1))[:, None]
        change = other.mean - self.mean
        variance = self.variance * (1 - share) + other.variance * share + change**2 * share * (1 - share)
        return Moments(count, self.mean + change * share, variance)

    def part(self, agents: slice | NDArray[np.intp]) -> Moments:
        """Select the moments of some of the agents."""
        return Moments(*(values[agents] for values in self))

    def packed(self) -> Array:
        """Pack into one array [P, 1 + 2 D] for communication."""
        return np.concatenate([self.number[:, None], self.mean, self.variance], axis=1)

    @classmethod
    def unpacked(cls, packed: Array) -> Moments:
        width = (packed.shape[1] - 1) // 2
        return cls(packed[:, 0], packed[:, 1 : 1 + width], packed[:, 1 + width :])


def discounted_sums(reward: Tensor, ended: Tensor, discount: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Running discounted sums [T, P, B] of past rewards in each episode, and the carry [P, B].

    `reward` and `ended` are [T, P, B], `discount` is [P], `before` [P, B] is the carry of the last call.
    """
    sums = torch.empty_like(reward)
    factor = discount.unsqueeze(-1)
    for time in range(reward.shape[0]):
        sums[time] = before * factor + reward[time]
        before = sums[time].masked_fill(ended[time], 0.0)
    return sums, before


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    """Shift and scale `x` [..., B] to mean 0 and variance 1 under `weight` [..., B], which sums to 1."""
    mean = (x * weight).sum(-1, keepdim=True)
    centred = x - mean
    return centred * _inverse_deviation(mean, (centred.square() * weight).sum(-1, keepdim=True))


def _inverse_deviation(mean: Tensor, variance: Tensor) -> Tensor:
    """The inverse standard deviation; NaN for a variance that overflowed, where 0 would pass for equal samples.

    Equal samples have the variance of rounding errors, which grow with their mean.
    """
    square = mean.square()
    return torch.rsqrt(variance + 1e-10 * square + 1e-30).add(variance + square, alpha=0.0)


WHERE, SUMS = "the rollout", "reward_sums"
MAX_REWARD = 10.0
"""Clip scaled rewards to this many standard deviations; while returns barely vary, one could reach thousands."""


class RolloutStatistics:
    """Sample moments over the ranks reached by `gather`, and the running statistics for reward scaling."""

    def __init__(self, gather: Gather, stopwatch: Stopwatch) -> None:
        self._gather = gather
        self._stopwatch = stopwatch
        self._rewards: Moments
        self._sums: Tensor | None = None

    def begin(self, agents: Sequence[Agent]) -> None:
        """Start a generation with the agents' own reward statistics; the sums of running episodes go on."""
        stats = [agent.state.rewards for agent in agents]
        self._rewards = Moments(
            np.array([rewards.count for rewards in stats]),
            np.array([[rewards.mean] for rewards in stats]),
            np.array([[rewards.variance] for rewards in stats]),
        )

    def begin_rollout(self, started: Tensor) -> None:
        """Restart the sums of episodes that have `started` [P, E]. Raises UserError if loaded ones do not fit."""
        self.check_sums(tuple(started.shape))
        if self._sums is not None:
            self._sums = self._sums.masked_fill(started.to(self._sums.device), 0.0)

    def end(self, agents: Sequence[Agent]) -> None:
        """Write the reward statistics back to the agents."""
        for index, agent in enumerate(agents):
            agent.state.rewards = RewardStats(*(float(values[index].item()) for values in self._rewards))

    def state_dict(self) -> Tensors:
        """The moments of discounted reward sums, which agents hold between generations."""
        return {name: torch.from_numpy(values) for name, values in self._rewards._asdict().items()}

    def load_state_dict(self, tensors: Tensors) -> None:
        """Load the output of `state_dict`. Raises UserError for an invalid one."""
        rewards_state = {name: torch.from_numpy(values.copy()) for name, values in self._rewards._asdict().items()}
        load_like(tensors, rewards_state, WHERE)
        _check_finite(rewards_state)
        self._rewards = Moments(**{name: values.numpy() for name, values in rewards_state.items()})

    def sums(self) -> Tensors:
        """The running discounted sums [P, E] of rewards, once there are any; episodes may go on over generations."""
        return {} if self._sums is None else {SUMS: self._sums}

    def load_sums(self, state: Tensors, device: torch.device) -> None:
        """Load the sums in `state`, if it has any. Raises UserError unless they are finite."""
        self._sums = state[SUMS].to(device) if SUMS in state else None
        _check_finite(self.sums())

    def check_sums(self, environments: tuple[int, ...]) -> None:
        """Raise UserError if there are sums of other environments than those of the shape (P, E)."""
        if self._sums is not None:
            check_tensors(self.sums(), {SUMS: (environments, torch.float32)}, WHERE)

    def moments(self, samples: Tensor, valid: Tensor) -> Moments:
        """Moments of samples [T, P, E, D] over the `valid` [T, P, E] steps of all ranks."""
        values, weight = (x.transpose(0, 1).flatten(1, 2) for x in (samples, valid))
        with self._stopwatch("communication"):
            return Moments.of(values, weight).over_ranks(self._gather)

    def scaled(self, reward: Tensor, ended: Tensor, valid: Tensor, discount: Tensor) -> Tensor:
        """Rewards [T, P, E] divided by the running standard deviation of their discounted sums.

        `discount` [P] discounts the sums; `ended` marks steps after which the sum restarts; `valid` marks steps that
        count.
        """
        before = torch.zeros_like(reward[0]) if self._sums is None else self._sums
        sums, self._sums = discounted_sums(reward, ended, discount, before)
        self._rewards = self._rewards.merged(self.moments(sums.unsqueeze(-1), valid))
        scale = torch.from_numpy(1 / np.sqrt(self._rewards.variance + 1e-8)).to(reward)
        return (reward * scale).clamp(-MAX_REWARD, MAX_REWARD)

    def united(self, counted: Tensor, advantage: Tensor, copies: int) -> tuple[Tensor, Tensor, Tensor]:
        """The loss weights, and the advantages' mean and inverse deviation, of minibatches that `copies` ranks share.

        This rank's weights are [U, P, B]: the mean over ranks of the weighted sums equals the mean over the `counted`
        [U, P, B] steps of all ranks. The mean and the inverse standard deviation are [U, P, 1].
        """
        samples, counts = (values.flatten(0, 1).T.unsqueeze(-1) for values in (advantage, counted))
        union = self.moments(samples.unsqueeze(-1), counts)
        number, mean, variance = (torch.from_numpy(x).view(*advantage.shape[:2], 1).to(advantage) for x in union)
        return counted * (copies / number.clamp(min=1)), mean, _inverse_deviation(mean, variance)


def _check_finite(statistics: Tensors) -> None:
    """Raise UserError unless all loaded statistics are finite."""
    if not all(values.isfinite().all() for values in statistics.values()):
        raise UserError(f"{WHERE}: its reward statistics are not finite")
