"""Rollout storage, cleared before each rollout.

Axes: T steps, L steps of a sequence, P agents, E environments, B sequences of a minibatch, U updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from evorl.envs.spaces import ObservationSpec
from evorl.replay.ring import Field, Found
from evorl.replay.storage import Storage
from evorl.types import Tensors, Transition, UserError

WHERE = "the rollout"
STATES, FIRST = "states", "first"
"""A tensor and a number in a snapshot, beside those of the storage."""


class Trajectories:
    """T steps of all environments, with the recurrent states before each of their T / L sequences.

    Memory is allocated at the first step, which shows the shapes of observations and actions.
    """

    def __init__(
        self, steps: int, sequence: int, frames: Mapping[str, int], computed: Sequence[str], device: torch.device
    ) -> None:
        """`frames` gives the stack depth of the stacked parts.

        The columns `computed` are not part of a step; they are written through views.
        """
        self._steps = steps
        self._sequence = sequence
        self._frames = frames
        self._computed = computed
        self._device = device
        self._storage: Storage | None = None
        self._rows: Tensors = {}
        self._first = 0
        self._shape = (0, 0)
        self._states: Tensor | None = None
        self._resumed: tuple[Tensors, dict[str, int]] | None = None

    def write(self, step: int, transition: Transition, columns: Mapping[str, Tensor], state: Tensor | None) -> None:
        """Store a step of all environments and its columns [P, E, ...]; step 0 clears the previous rollout."""
        if self._storage is None:
            self._storage = self._allocate(transition, columns)
        if step == 0:
            self._storage.clear()
        if self._resumed is not None:
            self._go_on(step, *self._resumed)
            self._resumed = None
        self._storage.write(
            {name: value.flatten(0, 1) for name, value in transition.observation.items()},
            {name: value.flatten(0, 1) for name, value in columns.items()},
            next_observation={},
            valid=transition.valid.flatten(),
            started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
        )
        if step == 0:
            # Older frames of the first stacks are in the rows before.
            self._first = self._storage.newest_row
            self._rows = self._storage.window(self._first, self._steps)
        if state is not None and step % self._sequence == 0:
            # Mutations change the number of recurrent units.
            if self._states is None or self._states.shape[1:] != state.shape:
                self._states = state.new_zeros((self._steps // self._sequence, *state.shape))
            self._states[step // self._sequence] = state

    def snapshot(self) -> tuple[Tensors, dict[str, int]]:
        """Return the steps of the rollout so far, at least one."""
        assert self._storage is not None
        tensors, numbers = self._storage.state()
        states = {} if self._states is None else {STATES: self._states}
        return {**tensors, **states}, {**numbers, FIRST: self._first}

    def resume(self, tensors: Tensors, numbers: dict[str, int]) -> None:
        """Go on with the rollout of a `snapshot`.

        Only the next step shows what a step consists of: `write` raises UserError if the snapshot is an invalid one.
        """
        self._resumed = tensors, numbers

    def _go_on(self, step: int, tensors: Tensors, numbers: dict[str, int]) -> None:
        """Load a snapshot of `step` steps. Raises UserError for an invalid one."""
        storage, rows, known = self._storage, dict(tensors), dict(numbers)
        assert storage is not None
        states, first = rows.pop(STATES, None), known.pop(FIRST, -1)
        storage.restore(rows, known)
        # The rows before the first step hold the older frames of its stacks.
        if storage.broken or not 0 <= first < storage.depth or storage.written != first + step:
            raise UserError(f"{WHERE}: it does not have the {step} steps of the rollout that it is said to have")
        if states is not None:
            shape = (self._steps // self._sequence, *self._shape)
            if states.dim() != 5 or tuple(states.shape[:3]) != shape or states.dtype != torch.float32:
                raise UserError(f"{WHERE}: its recurrent states are of other sequences")
            self._states = states.to(self._device)
        self._first = first
        self._rows = storage.window(first, self._steps)

    def column(self, name: str) -> Tensor:
        """Return a view [T, P, E, ...] of a column, the flag `valid`, or an unstacked `observation.` part."""
        values = self._rows[name]
        return values.view(values.shape[0], *self._shape, *values.shape[2:])

    def slots(self, index: Tensor) -> Tensor:
        """Return the slots [U, P, L, B] of the sequences at `index` [U, P, B] of each agent."""
        agents, envs = self._shape
        agent = torch.arange(agents, device=index.device)[:, None, None]
        chunk, env = index // envs, index % envs
        step = chunk.unsqueeze(2) * self._sequence + torch.arange(self._sequence, device=index.device)[:, None]
        return ((self._first + step) * agents + agent) * envs + env.unsqueeze(2)

    def gather(self, slots: Tensor, names: Iterable[str]) -> Found:
        """Gather the transitions at `slots` [...], with the columns and flags in `names`."""
        assert self._storage is not None
        return self._storage.gather(slots, names)

    def states(self, index: Tensor) -> Tensor | None:
        """Return the recurrent states [U, P, B, ...] before the sequences at `index` [U, P, B], or None."""
        if self._states is None:
            return None
        agents, envs = self._shape
        agent = torch.arange(agents, device=index.device)[:, None]
        place = (index // envs * agents + agent) * envs + index % envs
        found = self._states.flatten(0, 2).index_select(0, place.flatten())
        return found.view(*index.shape, *found.shape[1:])

    def _allocate(self, transition: Transition, columns: Mapping[str, Tensor]) -> Storage:
        self._shape = transition.valid.shape[0], transition.valid.shape[1]
        parts = {
            name: ObservationSpec("vector", tuple(value.shape[2:]), value.dtype, frames=self._frames.get(name, 0))
            for name, value in transition.observation.items()
        }
        fields: dict[str, Field] = {name: (tuple(value.shape[2:]), value.dtype) for name, value in columns.items()}
        fields |= dict.fromkeys(self._computed, ((), torch.float32))
        streams = self._shape[0] * self._shape[1]
        return Storage(self._steps, streams, parts, fields, self._device, store_next=False)
