"""Rollout statistics over the ranks that hold the same agents.

Axes: T steps, P agents, E environments, D components per sample; U updates, B steps of a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evorl.replay.moments import Gather, Moments
from evorl.replay.scaling import discounted_sums
from evorl.system.console import Stopwatch
from evorl.system.formats import load_like
from evorl.types import Agent, RewardStats, Tensors, UserError

WHERE = "the rollout"
MAX_REWARD = 10.0
"""Clip scaled rewards to this many standard deviations: while returns barely vary, one could be thousands."""


class RolloutStatistics:
    """Sample moments over the ranks reached by `gather`, and the running statistics for reward scaling."""

    def __init__(self, gather: Gather, stopwatch: Stopwatch) -> None:
        self._gather = gather
        self._stopwatch = stopwatch
        self._rewards: Moments
        self._sums: Tensor | None = None

    def begin(self, agents: Sequence[Agent]) -> None:
        """Start a generation with the agents' own reward statistics."""
        stats = [agent.state.rewards for agent in agents]
        self._sums = None
        self._rewards = Moments(
            np.array([each.count for each in stats]),
            np.array([[each.mean] for each in stats]),
            np.array([[each.variance] for each in stats]),
        )

    def end(self, agents: Sequence[Agent]) -> None:
        """Write the reward statistics back to the agents."""
        for agent, values in zip(agents, zip(*(each.reshape(-1) for each in self._rewards), strict=True), strict=True):
            agent.state.rewards = RewardStats(*map(float, values))

    def snapshot(self) -> Tensors:
        """Return the moments of discounted reward sums, and the running sums [P, E] once there are any."""
        moments = {name: torch.from_numpy(values) for name, values in self._rewards._asdict().items()}
        return moments | ({} if self._sums is None else {"sums": self._sums})

    def resume(self, tensors: Tensors, num_envs: int, device: torch.device) -> None:
        """Load the output of `snapshot`. Raises UserError for an invalid one."""
        own = {name: torch.from_numpy(values.copy()) for name, values in self._rewards._asdict().items()}
        if "sums" in tensors:
            own["sums"] = torch.zeros(len(own["number"]), num_envs, device=device)
        load_like(tensors, own, WHERE)
        if not all(values.isfinite().all() for values in own.values()) or (own["variance"] < 0).any():
            raise UserError(f"{WHERE}: its reward statistics are not those of any rewards")
        self._sums = own.pop("sums", None)
        self._rewards = Moments(**{name: values.numpy() for name, values in own.items()})

    def moments(self, samples: Tensor, valid: Tensor) -> Moments:
        """Return the moments of samples [T, P, E, D] over the `valid` [T, P, E] steps of all ranks."""
        values, weight = (x.transpose(0, 1).flatten(1, 2).double().cpu().numpy() for x in (samples, valid))
        with self._stopwatch("communication"):
            return Moments.over_ranks(values, weight, self._gather)

    def scaled(self, reward: Tensor, ended: Tensor, valid: Tensor, gamma: Tensor) -> Tensor:
        """Return rewards [T, P, E] divided by the running standard deviation of their discounted sums.

        `gamma` [P] discounts the sums; `ended` marks steps after which the sum restarts; `valid` marks steps that
        count.
        """
        before = torch.zeros_like(reward[0]) if self._sums is None else self._sums
        sums, self._sums = discounted_sums(reward, ended, gamma, before)
        self._rewards = self._rewards.merged(self.moments(sums.unsqueeze(-1), valid))
        scale = torch.from_numpy(1 / np.sqrt(self._rewards.variance + 1e-8)).to(reward)
        return (reward * scale).clamp(-MAX_REWARD, MAX_REWARD)

    def united(self, counted: Tensor, advantage: Tensor, copies: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's loss weights [U, P, B] for minibatches shared by `copies` ranks.

        The mean over ranks of the weighted sums equals the mean over the `counted` [U, P, B] steps of all ranks. Also
        return the mean and the inverse standard deviation [U, P, 1] of their advantages.
        """
        samples, counts = (values.flatten(0, 1).T.unsqueeze(-1) for values in (advantage, counted))
        union = self.moments(samples.unsqueeze(-1), counts)
        number, mean, variance = (torch.from_numpy(x).view(*advantage.shape[:2], 1).to(advantage) for x in union)
        return counted * (copies / number.clamp(min=1)), mean, torch.rsqrt(variance + 1e-8)
