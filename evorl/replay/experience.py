"""Experience for algorithms that learn from replay. Axes: P agents, E environments, B batch, U updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evorl.randomness import numpy_generator, torch_generator
from evorl.replay.buffer import ReplayBuffer
from evorl.replay.cadence import UpdateCadence
from evorl.replay.sampler import DistributedSampler
from evorl.timing import Stopwatch
from evorl.types import Agent, Batch, Decision, Tensors, Transition

Gather = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Every rank's numbers [R, K] from this rank's [K]; of this rank alone where agents are not replicated."""


class ReplayExperience:
    """Keeps all agents' transitions in one buffer, and says which batches are due.

    Agents learn from each other's transitions: P agents fill the buffer P times as fast with P kinds of behaviour.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        learning_starts: int,
        gather: Gather,
        lockstep: bool,
        part: int,
        seed: int,
        rank: int,
        stopwatch: Stopwatch,
    ) -> None:
        """`part` is this rank's place among those that `gather` asks; in `lockstep` all of them add equally many."""
        self.buffer = buffer
        self._learning_starts = learning_starts
        self._gather = gather
        self._lockstep = lockstep
        self._part = part
        self._seed = seed
        self._rank = rank
        self._stopwatch = stopwatch
        self._cadence: UpdateCadence
        self._sampler: DistributedSampler
        self._steps: NDArray[np.float64]
        self._sizes: NDArray[np.int64]

    def begin(self, agents: Sequence[Agent], generation: int) -> None:
        """Start a generation of these agents."""
        learn_step = np.array([agent.hyperparameters["learn_step"] for agent in agents])
        credit = np.array([agent.state.get("credit", 0.0) for agent in agents])
        batch_size = np.array([round(agent.hyperparameters["batch_size"]) for agent in agents])
        self._cadence = UpdateCadence(learn_step, credit)
        self._sizes = self._gather(np.array([float(self.buffer.size)]))[:, 0].astype(np.int64)
        self._sampler = DistributedSampler(
            self._part,
            batch_size,
            shared=numpy_generator(self._seed, generation=generation, rank=0, purpose="share of draws"),
            own=torch_generator(
                self._seed, generation=generation, rank=self._rank, purpose="draws", device=self.buffer.device
            ),
        )

    def add(self, transition: Transition, decision: Decision) -> None:
        """Remember what one step of all environments brought; resets are left out."""
        fields = {
            "observation": transition.observation,
            "action": decision["action"],
            "reward": transition.reward,
            "next_observation": transition.next_observation,
            "terminated": transition.terminated,
        }
        rows = {name: value.flatten(0, 1) for name, value in fields.items()}
        if transition.all_valid:
            self._steps = np.full(transition.valid.shape[0], float(transition.valid.shape[1]))
        else:
            kept = transition.valid.flatten()
            rows = {name: value[kept] for name, value in rows.items()}
            self._steps = transition.valid.sum(1).cpu().numpy().astype(np.float64)
        self.buffer.add(rows)

    def due(self) -> Iterator[Batch]:
        """The batches that the steps since the last call make due, one for each update of the population."""
        steps = self._agree_on_steps()
        if self._sizes.sum() < self._learning_starts:
            return
        counts = self._cadence.due(steps)
        updates = int(counts.max())
        if updates == 0:
            return
        with self._stopwatch("sampling"):
            index, weight = self._sampler.draw(updates, self._sizes)
            due = torch.from_numpy((np.arange(updates)[:, None] < counts).astype(np.float32)).to(weight.device)
            fields = self.buffer.gather(index)
        for update in range(updates):
            yield Batch({name: value[update] for name, value in fields.items()}, weight[update], due[update])

    def _agree_on_steps(self) -> NDArray[np.float64]:
        """Steps [P] of each agent since the last call, averaged over the ranks that hold it; notes all parts' sizes."""
        if self._lockstep:
            self._sizes = np.minimum(self._sizes + int(self._steps.sum()), self.buffer.capacity)
            return self._steps
        with self._stopwatch("communication"):
            known = self._gather(np.concatenate([[self.buffer.size], self._steps]))
        self._sizes = known[:, 0].astype(np.int64)
        return np.asarray(known[:, 1:].mean(0))

    def end(self, agents: Sequence[Agent]) -> None:
        """End the generation: each agent keeps the share of an update that it has earned."""
        for agent, credit in zip(agents, self._cadence.credit(), strict=True):
            agent.state["credit"] = float(credit)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """What a checkpoint keeps of this rank's part."""
        return self.buffer.state()

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Take over what `state` gave."""
        self.buffer.restore(rows, numbers)
