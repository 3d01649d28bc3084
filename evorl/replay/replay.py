"""Replay for off-policy algorithms, filled here or by actors.

Axes: P agents, E environments, N = P * E lanes, B batch, U updates. Actors compute initial priorities as Ape-X does
(arXiv 1803.00933).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from evorl.replay.batches import BatchBuilder
from evorl.replay.experience import ActingAgents, Experience, UpdateSchedule
from evorl.replay.observations import ObservationStatistics
from evorl.replay.rollout_memory import RolloutMemory
from evorl.replay.samplers import DRAWS, PRIORITIES, Sampler
from evorl.replay.statistics import Gather
from evorl.replay.storage import WHERE, Storage
from evorl.system.formats import load_like, numbers_to_tensors, part_of, with_prefix
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent
from evorl.types.batches import Batch, PolicyOutput, Transition, UpdateResult
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

GATHERED_BYTES = 2**28
"""Batches of several updates are gathered in groups of about this many bytes."""
ERROR = "error"
"""The rollout column with the td_error that sets initial priorities."""
COUNTERS, STATISTICS = "counters.", "statistics."
"""Prefixes of tensors in a state, beside those of the storage and the sampler."""


class ReplayExperience(Experience):
    """A replay buffer for all agents, with the schedule that says which updates are due.

    If the replay is shared, agents learn from each other's transitions: P agents fill it P times as fast with P
    behaviour policies. All batches of a vector step are drawn before the first update on them.
    """

    def __init__(
        self,
        storage: Storage,
        builder: BatchBuilder,
        sampler: Sampler,
        observations: ObservationStatistics,
        *,
        learning_starts: int,
        lockstep: bool,
        reward_clip: float | None,
        split_batches: bool,
        gather: Gather,
        stopwatch: Stopwatch,
        period: int,
    ) -> None:
        """`builder` makes batches of the indices that `sampler` draws; `observations` are those to normalise by.

        Learning starts after `learning_starts` transitions over all ranks. In `lockstep` all ranks that hold the same
        agents add equally many transitions. With `split_batches`, `learn_step` counts environment steps over all of
        these ranks, otherwise on each.
        """
        super().__init__(period, gather=gather, device=storage.device, stopwatch=stopwatch)
        self.storage = storage
        self.builder = builder
        self.sampler = sampler
        self._observations = observations
        self._learning_starts = learning_starts
        self._lockstep = lockstep
        self._reward_clip = reward_clip
        self._split_batches = split_batches
        self._schedule: UpdateSchedule
        self._new_steps: NDArray[np.float64]
        self._steps: NDArray[np.float64]
        self._sizes: NDArray[np.int64]
        self._full = False
        self._capacity = storage.rows * storage.lanes
        self._row_bytes = sum(2 * math.prod(part.shape) * part.dtype.itemsize for part in storage.parts.values()) + 32

    def begin(self, policy: ActingAgents, generation: int) -> None:
        super().begin(policy, generation)
        agents = policy.agents
        self._observations.begin(policy)
        learn_step = np.array([agent.hyperparameters["learn_step"] for agent in agents])
        debt = np.array([agent.state.update_debt for agent in agents])
        # Agents change places and environments may be reset: the next transition does not continue the last one.
        self.storage.break_lanes()
        self.builder.begin(agents)
        self._schedule = UpdateSchedule(learn_step, debt)
        self._steps, self._new_steps = np.zeros(len(agents)), np.zeros(len(agents))
        totals = self._gather(np.array([float(self.storage.drawable), float(self.storage.full)]))
        self._sizes, self._full = totals[:, 0].astype(np.int64), bool(totals[:, 1].all())
        self.sampler.begin(agents, generation, len(totals))

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments; invalid steps are never drawn."""
        clip, valid = self._reward_clip, transition.valid
        self._observations.add(transition)
        columns = {
            "action": output.action,
            "reward": transition.reward if clip is None else transition.reward.clamp(-clip, clip),
            "terminated": transition.terminated,
        }
        self.storage.write_step(transition, columns)
        if transition.all_valid:
            self._new_steps += float(valid.shape[1])
        else:
            self._new_steps += valid.sum(1).cpu().numpy()

    def extend(self, message: RolloutMemory) -> None:
        """Store an actor's rollout, with initial priorities from its errors.

        It does not continue the previous rollout, which may be another actor's: n-step windows end with it.
        """
        with self._stopwatch("receiving"):
            self.storage.break_lanes()
            for transition, output in _transitions_of(message):
                self.add(transition, output)
            errors = message.columns([ERROR])[ERROR].transpose(0, 1).flatten(1)
            self.sampler.insert(errors.double().numpy())

    def take_batches(self) -> Iterator[Batch]:
        """Count the steps since the last call over all ranks, and yield the batches that they make due."""
        steps = self._sync_steps()
        self._policy.acted(steps)
        # A ring also holds resets: even when full it may hold fewer than `learning_starts` valid transitions.
        if self._sizes.sum() < self._learning_starts and not self._full:
            return
        counts = self._schedule.due(steps if self._split_batches else steps / len(self._sizes))
        updates, everyone = int(counts.max()), int(counts.min())
        if updates == 0:
            return
        with self._stopwatch("sampling"):
            draws = self.sampler.draw(updates)
            due = torch.from_numpy((np.arange(updates)[:, None] < counts).astype(np.float32)).to(draws.weight.device)
        rows = draws.indices[0].numel() * (self.builder.transitions + self.builder.burn_in)
        at_once = max(1, GATHERED_BYTES // (rows * self._row_bytes))
        for first in range(0, updates, at_once):
            group = slice(first, first + at_once)
            with self._stopwatch("sampling"):
                batches = self.builder.batches(draws.of(group), due[group])
            for number, batch in enumerate(batches, first):
                batch.number, batch.all_due = number, number < everyone
                yield batch

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        if result.errors is not None:
            result = UpdateResult(result.active, self.builder.errors(result.errors, batch))
        self.sampler.observe(batch.number, result)

    def _sync_steps(self) -> NDArray[np.float64]:
        """Sum each agent's steps [P] since the last call over its ranks, and record every rank's replay size.

        The same exchange carries the samplers' totals. Ranks in lockstep skip it, and their samplers need none.
        """
        new, self._new_steps = self._new_steps, np.zeros_like(self._new_steps)
        if self._lockstep:
            self._sizes = np.minimum(self._sizes + int(new.sum()), self._capacity)
            self._full = self._full or bool((self._sizes == self._capacity).all())
            steps, samplers = new * len(self._sizes), np.zeros((len(self._sizes), 0))
        else:
            with self._stopwatch("sampling"):
                local = self.sampler.local_totals()
            with self._stopwatch("communication"):
                totals = self._gather(np.concatenate([[self.storage.drawable, self.storage.full], new, local]))
            self._sizes, self._full = totals[:, 0].astype(np.int64), bool(totals[:, 1].all())
            steps, samplers = totals[:, 2 : 2 + len(new)].sum(0), totals[:, 2 + len(new) :]
        self._steps = self._steps + steps
        with self._stopwatch("sampling"):
            self.sampler.sync(self._sizes, self._steps, samplers)
        return steps

    def end(self, agents: list[Agent]) -> None:
        """End the generation; each agent keeps its fractional update debt."""
        super().end(agents)
        self.sampler.end()
        self._observations.merge_waiting()
        for agent, debt in zip(agents, self._schedule.debt(), strict=True):
            agent.state.update_debt = float(debt)

    def state_dict(self) -> Tensors:
        """The contents of the replay and, within a generation, how far its schedule and draws are."""
        state = self.storage.state_dict() | self.sampler.state_dict()
        if not self._has_begun:
            return state
        return (
            state | with_prefix(COUNTERS, self._counters()) | with_prefix(STATISTICS, self._observations.state_dict())
        )

    def load_state_dict(self, state: Tensors) -> None:
        counters = self._counters() if self._has_begun else {}
        load_like(part_of(COUNTERS, state), counters, WHERE)
        if not all(values.isfinite().all() for values in counters.values()):
            raise UserError(f"{WHERE}: its counters are not finite")
        of_sampler = (PRIORITIES, DRAWS)
        others = (*of_sampler, COUNTERS, STATISTICS)
        self.storage.load_state_dict({name: state[name] for name in state if not name.startswith(others)})
        self.sampler.load_state_dict({name: state[name] for name in state if name.startswith(of_sampler)})
        if self._has_begun:
            self._schedule.steps = counters["steps"].numpy()
            self._steps, self._sizes = counters["made"].numpy(), counters["sizes"].numpy()
            self._full = bool(counters["full"])
            self._observations.load_state_dict(part_of(STATISTICS, state), self.storage.device)

    def _counters(self) -> Tensors:
        counters = {"steps": self._schedule.steps, "made": self._steps, "sizes": self._sizes}
        tensors = {name: torch.from_numpy(values.copy()) for name, values in counters.items()}
        return tensors | numbers_to_tensors(full=int(self._full))


def _transitions_of(message: RolloutMemory) -> Iterator[tuple[Transition, PolicyOutput]]:
    names = ("action", "reward", "terminated", "truncated", "started", "valid")
    observation, columns = message.observation(), message.columns(names)
    nothing = torch.zeros(0)
    for step in range(message.layout.steps):
        action, reward, terminated, truncated, started, valid = (columns[name][:, step] for name in names)
        transition = Transition(
            {name: value[:, step] for name, value in observation.items()},
            started,
            reward,
            message.next_observation(step),
            terminated,
            truncated,
            valid,
            bool(valid.all()),
            bool(truncated.any()),
        )
        yield transition, PolicyOutput(action, {}, nothing, nothing)
