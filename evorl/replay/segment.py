"""A rollout in memory shared by an actor and the learner, in the storage's layout.

Axes: T steps, P agents, E environments, K numbers for each of U units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evorl.envs.episodes import Collected
from evorl.envs.spaces import ObservationSpecs
from evorl.replay.ring import Empty, Field
from evorl.replay.storage import Storage
from evorl.types import PolicyOutput, Tensors, Transition


@dataclass(frozen=True)
class RolloutLayout:
    """Shapes of a rollout: observation `parts`, per-step columns (`fields`), and the recurrent `state` [K, U]."""

    steps: int
    agents: int
    num_envs: int
    parts: ObservationSpecs
    fields: Mapping[str, Field]
    state: tuple[int, int]

    @property
    def streams(self) -> int:
        return self.agents * self.num_envs


class RolloutMemory:
    """T steps of an actor's environments, overwritten by the next rollout.

    `empty` supplies the memory; an actor writes and a learner reads through two objects of one layout on the same
    memory.
    """

    def __init__(self, layout: RolloutLayout, empty: Empty) -> None:
        self.layout = layout
        steps, streams = layout.steps, layout.streams
        # Every step may leave true last observations; pages never written take no memory.
        self.storage = Storage(
            steps, streams, layout.parts, layout.fields, torch.device("cpu"), empty=empty, last=(steps + 1) * streams
        )
        self._states = empty((steps + 1, layout.agents, layout.num_envs, *layout.state), torch.float32)
        self.counts = empty((len(Collected._fields), layout.agents), torch.float64)
        self.number = 0
        self._first = empty((1,), torch.int64)
        rows = torch.arange(steps).view(1, steps, 1) * streams
        self._places = rows + torch.arange(streams).view(layout.agents, 1, layout.num_envs)

    def write(self, step: int, transition: Transition, output: PolicyOutput) -> None:
        """Store a step of all environments, in order from step 0, which clears the previous rollout."""
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
        self.storage.write(
            {name: value.flatten(0, 1) for name, value in transition.observation.items()},
            {name: columns[name].flatten(0, 1) for name in self.layout.fields if name in columns},
            next_observation={name: value.flatten(0, 1) for name, value in transition.next_observation.items()},
            valid=transition.valid.flatten(),
            started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
        )
        if step == 0:
            # Older frames of the first stacks are in the rows before.
            self._first[0] = self.storage.newest_row
        if output.state.numel():
            if step == 0:
                self._states[0] = output.state
            if transition.any_truncated or step == self.layout.steps - 1:
                self._states[step + 1] = output.next_state

    def put(self, name: str, values: Tensor) -> None:
        """Write a column [P, T, E] of all steps that was not part of the steps themselves."""
        first = int(self._first[0])
        rows = self.storage.columns[name][first : first + self.layout.steps]
        rows.copy_(values.transpose(0, 1).flatten(1, 2))

    def state(self, steps: int) -> Tensor | None:
        """Return the recurrent state [P, E, K, U] after `steps` steps: 0, or the end of a step in `ends`."""
        return self._states[steps].clone() if self._states.numel() else None

    def ends(self) -> list[int]:
        """Return the steps whose next observation needs its own bootstrap value: truncated ones and the last."""
        truncated = self.columns(["truncated"])["truncated"]
        truncated[:, -1] = True
        steps: list[int] = truncated.any(0).any(-1).nonzero()[:, 0].tolist()
        return steps

    def observation(self) -> Tensors:
        """Return copies of all observation parts [P, T, E, ...]."""
        return self.storage.observation(self.slots)

    def next_observation(self, step: int) -> Tensors:
        """Return copies of the next-observation parts [P, E, ...] of a step, including true last observations."""
        return self.storage.next_observation(self.slots[:, step])

    def columns(self, names: Iterable[str]) -> Tensors:
        """Return copies of columns and of the flag `valid`, each [P, T, E, ...]."""
        return self.storage.gather_columns(self.slots, names)

    @property
    def slots(self) -> Tensor:
        """The slots [P, T, E] of the steps."""
        return self._places + int(self._first[0]) * self.layout.streams
