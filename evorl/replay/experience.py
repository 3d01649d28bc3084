"""The base class of replay buffers and rollouts, and the schedule of updates.

Axes: P agents, E environments; recurrent states have K numbers for each of N units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.statistics import Gather, Moments
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent
from evorl.types.batches import Batch, PolicyOutput, Transition, UpdateResult
from evorl.types.tensors import Observation, Tensors


class ActingAgents(Protocol):
    """The policy that acts in a generation, as its experience sees it."""

    agents: list[Agent]

    def acted(self, steps: NDArray[np.float64]) -> None:
        """Record `steps` [P] new transitions of each agent, summed over all ranks that hold it."""

    def value(self, observation: Observation, state: Tensor | None) -> Tensor:
        """State values V(s) [P, E] of observations [P, E, ...] with recurrent state [P, E, K, N]."""

    def batch_targets(self, batch: Batch) -> Tensors:
        """The targets [P, B] of a batch that stay fixed during its updates, by name."""

    def update_observation_stats(self, part: str, moments: Moments) -> None:
        """Merge `moments` into the running statistics with which each agent normalises an observation part."""


class Experience:
    """A buffer of experience: environments or actor processes feed it, and it yields the batches that are due.

    Environments `add` every step, actor processes `extend` it by a message at a time. `take_batches` follows either,
    and `observe` each update. A subclass that has a state overrides `state_dict` and `load_state_dict`.
    """

    def __init__(self, period: int, *, gather: Gather, device: torch.device, stopwatch: Stopwatch) -> None:
        """`gather` stacks an array from every rank that holds the same agents along a new leading axis."""
        self.period = period
        """A generation has a multiple of this many steps of each environment."""
        self._gather = gather
        self._device = device
        self._stopwatch = stopwatch
        self._policy: ActingAgents
        self._has_begun = False

    def begin(self, policy: ActingAgents, generation: int) -> None:
        """Start a generation with the agents of `policy`."""
        self._policy, self._has_begun = policy, True

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all of this process's environments."""
        raise NotImplementedError(f"{type(self).__name__} is fed by actor processes: use extend")

    def extend(self, message: Any) -> None:
        """Copy an actor's message from shared memory, which the actor overwrites afterwards."""
        raise NotImplementedError(f"{type(self).__name__} is fed by environments: use add")

    def take_batches(self) -> Iterator[Batch]:
        """Count the new transitions over the ranks that hold the agents (collective), and yield the batches now due.

        Every rank yields equally many. `ActingAgents.acted` is told the number of new transitions on all those ranks:
        before the first batch of a replay, but after the last of a rollout, so that learning rates stay constant while
        agents learn from a rollout.
        """
        raise NotImplementedError

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Receive the result of the update with `batch`, before the next batch is yielded."""

    def end(self, agents: list[Agent]) -> None:
        """End the generation; state that belongs to an agent is stored with it."""
        self._has_begun = False

    def state_dict(self) -> Tensors:
        """This rank's part of a checkpoint: what later generations need and, within one, what the rest of it needs."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict`: between generations before `begin`, else after it with the same agents.

        Raises UserError for an invalid one.
        """


class UpdateSchedule:
    """One update of an agent per `learn_step` [P] of its environment steps, exact for any chunking of the steps.

    `debt` [P] is the fraction of an update already earned, between 0 and 1.
    """

    def __init__(self, learn_step: NDArray[np.float64], debt: NDArray[np.float64]) -> None:
        self._learn_step = learn_step
        self._debt = debt
        self.steps = np.zeros_like(learn_step)
        """The environment steps [P] whose updates have been handed out."""

    def due(self, steps: NDArray[np.float64]) -> NDArray[np.int64]:
        """Updates [P] that become due after `steps` [P] more environment steps."""
        before = self._earned()
        self.steps = self.steps + steps
        return self._earned() - before

    def debt(self) -> NDArray[np.float64]:
        """The fraction of an update [P] earned but not yet due."""
        return np.maximum(self.steps / self._learn_step + self._debt - self._earned(), 0.0)

    def _earned(self) -> NDArray[np.int64]:
        # Computed from the total, not incrementally: 3 * (8 / 3) must make 8 updates, not 7.
        return np.floor(self.steps / self._learn_step + self._debt + 1e-9).astype(np.int64)
