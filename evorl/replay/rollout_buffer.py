"""The steps of one rollout of all environments, in memory of its own or shared with an actor.

Axes: T steps of a rollout, L steps of a sequence, P agents, E environments, B sequences of a minibatch, U updates;
recurrent states have K numbers for each of their units, [K, N].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evorl.envs.episodes import Collected
from evorl.envs.spaces import ObservationSpecs
from evorl.replay.storage import Empty, Field, Storage, Transitions
from evorl.system.formats import load_like
from evorl.types import PolicyOutput, Tensors, Transition, UserError

WHERE = "the rollout"
STATES, FIRST = "states", "first"
"""Tensors in a state, besides those of the storage."""


@dataclass(frozen=True)
class RolloutLayout:
    """Shapes of a rollout: observation `parts`, per-step columns (`fields`), and the recurrent `state` [K, N].

    Recurrent states are stored before every `sequence`-th step and after the last one.
    """

    steps: int
    agents: int
    num_envs: int
    parts: ObservationSpecs
    fields: Mapping[str, Field]
    state: tuple[int, int]
    sequence: int = 1

    @property
    def lanes(self) -> int:
        return self.agents * self.num_envs


class RolloutBuffer:
    """T steps of all environments with their recurrent states, overwritten by the next rollout.

    With memory from `empty`, two buffers of one layout on the same memory show the same rollout: an actor writes to
    one, and a learner reads the other.
    """

    def __init__(
        self, layout: RolloutLayout, device: torch.device, store_next: bool = False, empty: Empty | None = None
    ) -> None:
        """Without `store_next` the buffer has no next observations."""
        self.layout = layout
        steps, lanes = layout.steps, layout.lanes
        # Every step may leave final observations; pages never written take no memory.
        last = (steps + 1) * lanes if store_next else None
        self.storage = Storage(steps, lanes, layout.parts, layout.fields, device, store_next, empty=empty, last=last)
        shape = (steps // layout.sequence + 1, layout.agents, layout.num_envs, *layout.state)
        self._states = torch.zeros(shape, device=device) if empty is None else empty(shape, torch.float32)
        # The row of the first step, after any rows with older frames of stacks. On the CPU, because the host reads it.
        self._first = torch.zeros(1, dtype=torch.int64) if empty is None else empty((1,), torch.int64)

    def write(self, step: int, transition: Transition, output: PolicyOutput) -> None:
        """Store a step of all environments, in order from step 0, which clears the previous rollout.

        Of the transition and the policy's extras, the columns in the layout are stored.
        """
        layout, storage = self.layout, self.storage
        if step == 0:
            storage.clear()
        columns = {
            **output.extras,
            "action": output.action,
            "reward": transition.reward,
            "terminated": transition.terminated,
            "truncated": transition.truncated,
            "started": transition.started,
        }
        storage.write_step(transition, {name: columns[name] for name in layout.fields if name in columns})
        if step == 0:
            self._first[0] = storage.newest_row
        if self._states.numel():
            if step % layout.sequence == 0:
                self._states[step // layout.sequence] = output.state
            if step == layout.steps - 1:
                self._states[-1] = output.next_state

    def column(self, name: str) -> Tensor:
        """View [T, P, E, ...] of a column, the flag `valid`, or an unstacked `observation.` part.

        Columns of the layout that are no part of a step are written through it.
        """
        layout = self.layout
        rows = self.storage.window(int(self._first[0]), layout.steps)[name]
        return rows.view(layout.steps, layout.agents, layout.num_envs, *rows.shape[2:])

    @property
    def index(self) -> Tensor:
        """The index [P, T, E] of each step in the storage."""
        layout, device = self.layout, self.storage.device
        step, agent, env = (torch.arange(n, device=device) for n in (layout.steps, layout.agents, layout.num_envs))
        return self._index(step.view(1, -1, 1), agent.view(-1, 1, 1), env)

    def sequence_index(self, index: Tensor) -> Tensor:
        """The index [U, P, L, B] in the storage of the steps of each agent's sequences `index` [U, P, B]."""
        layout, device = self.layout, index.device
        step = (index // layout.num_envs).unsqueeze(2) * layout.sequence
        along = torch.arange(layout.sequence, device=device)[:, None]
        agent = torch.arange(layout.agents, device=device)[:, None, None]
        return self._index(step + along, agent, (index % layout.num_envs).unsqueeze(2))

    def _index(self, step: Tensor | int, agent: Tensor, env: Tensor) -> Tensor:
        return ((int(self._first[0]) + step) * self.layout.agents + agent) * self.layout.num_envs + env

    def gather(self, index: Tensor, names: Iterable[str]) -> Transitions:
        """Copies of the transitions at `index` [...], with the columns and flags in `names`."""
        return self.storage.gather(index, names)

    def observation(self) -> Tensors:
        """Copies of all observation parts [P, T, E, ...]."""
        return self.storage.observation(self.index)

    def next_observation(self, step: int) -> Tensors:
        """Copies of the next-observation parts [P, E, ...] of a step, including final observations."""
        agent, env = (torch.arange(n, device=self.storage.device) for n in (self.layout.agents, self.layout.num_envs))
        return self.storage.next_observation(self._index(step, agent[:, None], env))

    def columns(self, names: Iterable[str]) -> Tensors:
        """Copies of columns and of the flag `valid`, each [P, T, E, ...]."""
        return self.storage.gather_columns(self.index, names)

    def ends(self) -> list[int]:
        """Steps whose next observation needs its own bootstrap value: truncated ones and the last."""
        truncated = self.column("truncated").flatten(1).any(1)
        truncated[-1] = True
        steps: list[int] = truncated.nonzero()[:, 0].tolist()
        return steps

    def state(self, steps: int) -> Tensor | None:
        """Copy of the recurrent state [P, E, K, N] after `steps` steps, a multiple of the sequence length, or None."""
        return self._states[steps // self.layout.sequence].clone() if self._states.numel() else None

    def states(self, index: Tensor) -> Tensor | None:
        """Recurrent states [U, P, B, K, N] before the sequences at `index` [U, P, B], or None."""
        if not self._states.numel():
            return None
        agents, envs = self.layout.agents, self.layout.num_envs
        agent = torch.arange(agents, device=index.device)[:, None]
        state_rows = (index // envs * agents + agent) * envs + index % envs
        states = self._states.flatten(0, 2).index_select(0, state_rows.flatten())
        return states.view(*index.shape, *states.shape[1:])

    @property
    def steps_held(self) -> int:
        """The number of steps that are stored."""
        return self.storage.written - int(self._first[0])

    def state_dict(self) -> Tensors:
        """The steps of the rollout so far, at least one."""
        return self.storage.state_dict() | self._tensors()

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict` of a buffer of the same layout. Raises UserError for another one."""
        tensors = self._tensors()
        load_like({name: state[name] for name in (FIRST, STATES) if name in state}, tensors, WHERE)
        try:
            self.storage.load_state_dict({name: values for name, values in state.items() if name not in tensors})
        except UserError as error:
            raise UserError(f"{WHERE} of an interim checkpoint: {error}") from error
        # The rows before the first step hold the older frames of its stacks.
        if self.storage.broken or not 0 <= int(self._first[0]) < self.storage.depth:
            raise UserError(f"{WHERE}: its first step is in row {int(self._first[0])}")

    def _tensors(self) -> Tensors:
        return {FIRST: self._first} | ({STATES: self._states} if self._states.numel() else {})


class RolloutMemory(RolloutBuffer):
    """A rollout in memory that an actor shares with its learner, with the actor's counters."""

    def __init__(self, layout: RolloutLayout, empty: Empty) -> None:
        super().__init__(layout, torch.device("cpu"), store_next=True, empty=empty)
        self.counts = empty((len(Collected._fields), layout.agents), torch.float64)
        self.number = 0
