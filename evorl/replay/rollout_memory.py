"""The steps of one rollout of all environments, in memory that an actor shares with its learner.

Axes: T steps of a rollout, P agents, E environments; recurrent states have K numbers for each of N units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evorl.envs.episodes import Collected
from evorl.envs.spaces import ObservationSpecs
from evorl.replay.storage import Empty, Field, Storage
from evorl.types.batches import PolicyOutput, Transition
from evorl.types.tensors import Tensors


@dataclass(frozen=True)
class RolloutLayout:
    """Shapes of a rollout: observation `parts`, per-step columns (`fields`), and the recurrent `state` [K, N]."""

    steps: int
    agents: int
    num_envs: int
    parts: ObservationSpecs
    fields: Mapping[str, Field]
    state: tuple[int, int]


class RolloutMemory:
    """T steps of all environments with their recurrent states and the actor's counters.

    Two of one layout on the same memory show the same rollout: an actor writes to one, and a learner reads the other.
    The next rollout overwrites it.
    """

    def __init__(self, layout: RolloutLayout, empty: Empty) -> None:
        self.layout = layout
        steps, agents, envs = layout.steps, layout.agents, layout.num_envs
        self.storage = Storage(steps, agents * envs, layout.parts, layout.fields, torch.device("cpu"), empty=empty)
        self._states = empty((steps + 1, agents, envs, *layout.state), torch.float32)
        """The recurrent states before each step and after the last one."""
        self._first = empty((1,), torch.int64)
        """The row of the first step, after any rows with older frames of stacks."""
        self.counts = empty((len(Collected._fields), agents), torch.float64)
        """The actor's counters of each agent [C, P], in the order of `Collected`."""
        self.number = 0
        """The message's number within its rank, by which the learner hands it out."""

    def write(self, step: int, transition: Transition, output: PolicyOutput) -> None:
        """Store a step of all environments, in order from step 0, which clears the previous rollout.

        Of the transition and the policy's extras, the columns in the layout are stored.
        """
        if step == 0:
            self.storage.clear()
        columns = {
            **output.extras,
            "action": output.action,
            "reward": transition.reward,
            "terminated": transition.terminated,
            "truncated": transition.truncated,
            "started": transition.started,
        }
        self.storage.write_step(transition, {name: columns[name] for name in self.layout.fields if name in columns})
        if step == 0:
            self._first[0] = self.storage.newest_row
        if self._states.numel():
            self._states[step] = output.state
            self._states[step + 1] = output.next_state

    @property
    def index(self) -> Tensor:
        """The index [T, P, E] of each step in the storage."""
        layout, first = self.layout, int(self._first[0]) * self.storage.lanes
        steps = torch.arange(first, first + layout.steps * self.storage.lanes)
        return steps.view(layout.steps, layout.agents, layout.num_envs)

    def write_column(self, name: str, values: Tensor) -> None:
        """Write values [T, P, E] to a column of all steps."""
        self.storage.columns[name].view(-1)[self.index] = values

    def observation(self) -> Tensors:
        """Copies of all observation parts [P, T, E, ...]."""
        return self.storage.observation(self.index.transpose(0, 1))

    def next_observation(self, step: int) -> Tensors:
        """Copies of the next-observation parts [P, E, ...] of a step, including final observations."""
        return self.storage.next_observation(self.index[step])

    def columns(self, names: Iterable[str]) -> Tensors:
        """Copies of columns and of the flag `valid`, each [P, T, E, ...]."""
        return self.storage.gather_columns(self.index.transpose(0, 1), names)

    def ends(self) -> list[int]:
        """Steps whose next observation needs its own bootstrap value: truncated ones and the last."""
        truncated = self.columns(["truncated"])["truncated"].any(2).any(0)
        truncated[-1] = True
        steps: list[int] = truncated.nonzero()[:, 0].tolist()
        return steps

    def state(self, steps: int) -> Tensor | None:
        """Copy of the recurrent state [P, E, K, N] after `steps` steps, or None."""
        return self._states[steps].clone() if self._states.numel() else None
