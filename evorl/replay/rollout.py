"""Experience for algorithms that learn from what they just did.

Axes: T steps of a rollout, L steps of a sequence, P agents, E environments, B sequences of a minibatch, U updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.losses import normalized
from evorl.moments import Moments
from evorl.randomness import torch_generator
from evorl.replay import Actors, Gather
from evorl.replay.columns import Column, FrameColumn, PlainColumn
from evorl.replay.minibatches import Minibatches
from evorl.returns import discounted_sums, gae
from evorl.spaces import Parts, as_numbers
from evorl.timing import Stopwatch
from evorl.types import Agent, Batch, Decision, Recall, Tensors, Transition

GATHERED_BYTES = 2**24
"""Minibatches are gathered several at once, as many as take about so much memory: small ones cost calls, not copies."""

MOST_REWARD = 10.0
"""Scaled rewards are cut at so many standard deviations: before returns have varied, one could be thousands."""


@dataclass(frozen=True)
class RolloutSettings:
    """How long rollouts and their sequences are, and what is normalised."""

    steps: int
    num_envs: int
    sequence: int
    reward_clip: float | None
    normalize_advantage: bool
    normalize_rewards: bool
    normalized: tuple[str, ...]
    """The parts of an observation that agents normalise."""
    copies: int = 1
    """The number of ranks that make each minibatch together; where it is 1 every rank makes its own."""


class RolloutExperience:
    """Keeps the last T steps of all environments, and then gives minibatches of them.

    `period` is how many steps make a rollout; a generation has a whole number of them.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        parts: Parts,
        *,
        gather: Gather,
        seed: int,
        rank: int,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        """`gather` gives the numbers of every rank that holds the same agents, as one array with a leading axis."""
        self.period = settings.steps
        self._settings = settings
        self._parts = parts
        self._gather = gather
        self._seed = seed
        self._rank = rank
        self._device = device
        self._stopwatch = stopwatch
        self._row_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values()) + 32
        frames = {name: part.frames for name, part in parts.items() if part.frames}
        self._columns: dict[str, Column] = {
            f"observation.{name}": FrameColumn(settings.steps, count) for name, count in frames.items()
        }
        self._memory = PlainColumn(settings.steps // settings.sequence)
        self._remembers = False
        self._step = 0
        self._population: Actors
        self._minibatches: Minibatches
        self._generator: torch.Generator
        self._numbers: Tensors
        self._rewards: Moments
        self._reward_sums: Tensor | None

    def begin(self, population: Actors, generation: int) -> None:
        """Start a generation of these agents."""
        agents, settings = population.agents, self._settings
        self._population = population
        self._step = 0
        self._reward_sums = None
        steps = settings.steps * settings.num_envs
        self._minibatches = Minibatches(agents, steps, settings.sequence, self._device, settings.copies)
        self._generator = torch_generator(
            self._seed, generation=generation, rank=self._rank, purpose="minibatches", device=self._device
        )
        self._numbers = {
            name: torch.tensor([agent.hyperparameters[name] for agent in agents], device=self._device)
            for name in ("gamma", "gae_lambda")
        }
        number, mean, variance = (
            np.array([agent.state.get(f"rewards.{name}", 0.0) for agent in agents]) for name in Moments._fields
        )
        self._rewards = Moments(number, mean[:, None], variance[:, None])

    def add(self, transition: Transition, decision: Decision) -> None:
        """Remember what one step of all environments brought."""
        step, clip = self._step, self._settings.reward_clip
        after = decision.get("next_memory")
        values = {f"observation.{name}": value for name, value in transition.observation.items()}
        values |= {name: value for name, value in decision.items() if name in ("raw", "log_prob", "value")}
        values["reward"] = transition.reward if clip is None else transition.reward.clamp(-clip, clip)
        values["terminated"] = transition.terminated
        values["truncated"] = transition.truncated
        values["valid"] = transition.valid
        if transition.any_truncated or step == self.period - 1:
            values["next_value"] = self._population.value(transition.next_observation, after)
        for name, value in values.items():
            if name not in self._columns:
                self._columns[name] = PlainColumn(self.period)
            self._columns[name].write(step, value, transition.observation["started"])
        self._remembers = after is not None
        if after is not None and step % self._settings.sequence == 0:
            started = transition.observation["started"]
            self._memory.write(step // self._settings.sequence, decision["memory"], started)
        self._step += 1

    def due(self) -> Iterator[Batch]:
        """The minibatches of a rollout that is complete; every rank that holds the same agents gives equally many."""
        if self._step < self.period:
            return
        self._step = 0
        self._population.acted(self._agree_on_steps())
        with self._stopwatch("sampling"):
            self._appraise()
            index = self._minibatches.draw(self._generator)
        going = torch.ones_like(self._minibatches.due[0])
        for batch, later in zip(self._batches(index), self._minibatches.later, strict=True):
            planned = batch.due
            batch.due = planned * going
            yield batch
            going = torch.where(planned > 0, batch.due, going)
            # All ranks stop here or none does: what stops an agent is averaged over them.
            if not (going * later).any():
                break
        self._absorb()

    def end(self, agents: list[Agent]) -> None:
        """End the generation: each agent keeps the statistics of its rewards."""
        if not self._settings.normalize_rewards:
            return
        for name, values in zip(Moments._fields, self._rewards, strict=True):
            for agent, value in zip(agents, values.reshape(-1), strict=True):
                agent.state[f"rewards.{name}"] = float(value)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Nothing outlasts a generation."""
        return {}, {}

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Nothing outlasts a generation."""

    def _agree_on_steps(self) -> NDArray[np.float64]:
        """The transitions [P] of each agent in the rollout, over all ranks that hold it."""
        steps = self._columns["valid"].whole().sum((0, 2)).cpu().numpy().astype(np.float64)
        with self._stopwatch("communication"):
            return np.asarray(self._gather(steps).sum(0))

    def _appraise(self) -> None:
        """Estimate the advantage of every step, and the return that its value should have been."""
        column = {name: self._columns[name].whole() for name in ("reward", "value", "terminated", "truncated", "valid")}
        nothing = ~column["valid"]
        ended = column["terminated"] | column["truncated"] | nothing
        next_value = column["value"].roll(-1, 0)
        exceptions = self._columns["next_value"].whole()
        next_value = torch.where(column["truncated"], exceptions, next_value)
        next_value[-1] = exceptions[-1]
        reward = self._scaled(column["reward"], ended, column["valid"])
        gamma, trace = self._numbers["gamma"], self._numbers["gae_lambda"]
        # What was no transition brought just what was expected, so that no step before it gains or loses by it.
        reward = torch.where(nothing, column["value"], reward)
        advantage = gae(reward, column["value"], next_value, column["terminated"] | nothing, ended, gamma, trace)
        self._columns["advantage"] = PlainColumn.of(advantage)
        self._columns["return"] = PlainColumn.of(advantage + column["value"])

    def _scaled(self, reward: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Rewards [T, P, E] divided by the standard deviation of their running discounted sums, if that is wanted."""
        if not self._settings.normalize_rewards:
            return reward
        before = torch.zeros_like(reward[0]) if self._reward_sums is None else self._reward_sums
        sums, self._reward_sums = discounted_sums(reward, ended, self._numbers["gamma"], before)
        self._rewards = self._rewards.merged(self._moments(sums.unsqueeze(-1), valid))
        scale = torch.from_numpy(1 / np.sqrt(self._rewards.variance + 1e-8)).to(reward)
        return (reward * scale).clamp(-MOST_REWARD, MOST_REWARD)

    def _moments(self, samples: Tensor, valid: Tensor) -> Moments:
        """Moments of [T, P, E, D] over the steps and all ranks that hold the same agents."""
        values, weight = (x.transpose(0, 1).flatten(1, 2).double().cpu().numpy() for x in (samples, valid))
        with self._stopwatch("communication"):
            first, *others = (Moments.unpacked(p) for p in self._gather(Moments.of(values, weight).packed()))
        for other in others:
            first = first.merged(other)
        return first

    def _absorb(self) -> None:
        """Let the agents normalise by what they saw, now that nothing more is learned from the rollout.

        Before, log-probabilities would be compared with those of another normalisation.
        """
        valid = self._columns["valid"].whole()
        for part in self._settings.normalized:
            seen = as_numbers(self._columns[f"observation.{part}"].whole(), self._parts[part])
            self._population.absorb(part, self._moments(seen.reshape(*seen.shape[:3], -1), valid))

    def _batches(self, index: Tensor) -> Iterator[Batch]:
        """The batches of all updates, given their sequences [U, P, B], gathered several at once."""
        rows = index.shape[1] * index.shape[2] * self._settings.sequence
        at_once = max(1, GATHERED_BYTES // (rows * self._row_bytes))
        for first in range(0, len(index), at_once):
            with self._stopwatch("sampling"):
                batches = self._gathered(index, slice(first, first + at_once))
            yield from batches

    def _gathered(self, index: Tensor, updates: slice) -> list[Batch]:
        """The batches of some updates, given all updates' sequences [U, P, B]."""
        index, counted = index[updates], self._minibatches.counted[updates]
        agents, envs, length = index.shape[1], self._settings.num_envs, self._settings.sequence
        agent = torch.arange(agents, device=index.device)[:, None]
        chunk, env = index // envs, index % envs
        step = chunk.unsqueeze(2) * length + torch.arange(length, device=index.device)[:, None]
        rows = (step * agents + agent.unsqueeze(1)) * envs + env.unsqueeze(2)
        flat = rows.flatten(2)
        fields = {
            name: column.gather(flat)
            for name, column in self._columns.items()
            if name not in ("reward", "terminated", "truncated", "next_value", "valid", "observation.started")
        }
        weight = self._columns["valid"].gather(flat) * counted.unsqueeze(2).expand_as(rows).flatten(2)
        if self._settings.copies > 1:
            weight, fields["advantage"] = self._united(weight, fields["advantage"])
        else:
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
            if self._settings.normalize_advantage:
                fields["advantage"] = normalized(fields["advantage"], weight)
        recalls: list[Recall | None] = [None] * len(index)
        if self._remembers:
            memory = self._memory.gather((chunk * agents + agent) * envs + env)
            started = self._columns["observation.started"].gather(rows)
            recalls = [Recall(*pair) for pair in zip(memory, started, strict=True)]
        due = self._minibatches.due[updates]
        return [
            Batch({name: value[u] for name, value in fields.items()}, weight[u], due[u], recalls[u])
            for u in range(len(index))
        ]

    def _united(self, counted: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and advantages [U, P, B] of this rank's part of minibatches that all ranks make together.

        The mean over ranks of weighted sums is then the mean over the `counted` steps of all ranks, by whose mean and
        variance advantages are normalised, if that is wanted.
        """
        samples, counts = (values.flatten(0, 1).T.unsqueeze(-1) for values in (advantage, counted))
        union = self._moments(samples.unsqueeze(-1), counts)
        number, mean, variance = (torch.from_numpy(x).view(*advantage.shape[:2], 1).to(advantage) for x in union)
        weight = counted * (self._settings.copies / number.clamp(min=1))
        if self._settings.normalize_advantage:
            advantage = (advantage - mean) * torch.rsqrt(variance + 1e-8)
        return weight, advantage
