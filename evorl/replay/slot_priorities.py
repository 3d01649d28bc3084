"""The priorities of a storage's slots, row by row as they are written and dropped.

Axes: P agents, N streams, S slots of some rows, K slots that are set, U updates, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from evorl.replay.priorities import Floats, Integers, PriorityTree
from evorl.replay.storage import Storage
from evorl.replay.stored import WHERE, rows_held
from evorl.system.formats import check_tensors
from evorl.types import Tensors, UserError

FIRST_PRIORITY = 1.0
"""The priority of transitions while an agent has given none."""


class SlotPriorities:
    """Holds each agent's priority of every slot that it may draw; all others have 0.

    Rows get their priorities and lose them when they are asked to, not when the storage changes, so that what was drawn
    before can still be set. A new transition has the largest priority that its agent has given so far.
    """

    def __init__(self, storage: Storage, agents: int, shared: bool) -> None:
        """Begin empty. Unless priorities are `shared`, an agent may draw what is written to its own N / P streams."""
        self.tree = PriorityTree(agents, storage.slots)
        self.maximum = np.full(agents, FIRST_PRIORITY)
        """The largest priority [P] that was ever given."""
        self.oldest = 0
        """The number of the first row that has priorities."""
        self._newest = 0
        """The number of the first row that has none yet."""
        self._storage = storage
        self._shared = shared
        owner = np.arange(storage.streams) * agents // storage.streams
        self._may_draw = (owner == np.arange(agents)[:, None]) | shared
        self._agents: list[int] = []

    def begin(self, agents: list[tuple[int, int | None]]) -> None:
        """Hand the priorities on to these agents, given by their ids and those of their parents.

        An agent has the priorities that it had, or those of its parent. To one that has neither here, all is new.
        """
        places = {id: place for place, id in enumerate(self._agents)}
        known = (id if id in places else parent for id, parent in agents)
        sources = np.array([-1 if id is None else places.get(id, -1) for id in known])
        new = sources < 0
        if not self._agents:
            self.oldest, self._newest = self._storage.oldest, self._storage.written
        elif (sources != np.arange(len(sources))).any():
            self.tree.take_over(sources)
            self.maximum = np.where(new, FIRST_PRIORITY, self.maximum[sources])
        if new.any():
            for start, stop, mask in self._rows(self.oldest, self._newest):
                kept = self.tree.leaves[:, start:stop]
                self.tree.fill(start, stop, np.where(new[:, None], mask * FIRST_PRIORITY, kept))
        self._agents = [id for id, _ in agents]

    def drop(self) -> None:
        """Forget the rows that can no longer be drawn."""
        for start, stop in self._pieces(self.oldest, min(self._storage.oldest, self._newest)):
            self.tree.fill(start, stop, 0.0)
        self.oldest = max(self.oldest, self._storage.oldest)
        self._newest = max(self._newest, self.oldest)

    def fresh(self) -> Floats:
        """Return how many transitions [P] were written that have no priority yet."""
        rows = self._rows(self._newest, self._storage.written)
        return sum((mask.sum(1) for _, _, mask in rows), np.zeros(len(self.maximum)))

    def insert(self, priority: Floats | None = None) -> None:
        """Give those the largest priority, or where there are some given priorities [T, N] of the T newest rows."""
        storage = self._storage
        if priority is not None:
            # A ring of fewer rows has kept the last of them only.
            priority = priority[-(storage.written - self._newest) :]
            before = np.zeros((storage.written - self._newest - len(priority), storage.streams))
            flat = np.concatenate([before, priority]).reshape(-1)
            self.maximum = np.maximum(self.maximum, flat.max(initial=0.0))
        place = 0
        for start, stop, mask in self._rows(self._newest, storage.written):
            given = self.maximum[:, None] if priority is None else flat[place : place + stop - start]
            self.tree.fill(start, stop, mask * given)
            place += stop - start
        self._newest = storage.written

    def set(self, slots: Integers, priority: Floats, where: NDArray[np.bool_]) -> None:
        """Set `slots` [P, K] to priorities [P, K] `where` [P, K]; of a slot that is set twice the last counts."""
        self.maximum = np.maximum(self.maximum, np.max(priority, 1, where=where, initial=0.0))
        self.tree.set(slots, priority, where)

    def stands(self, slots: Integers, newest: int) -> NDArray[np.bool_]:
        """Return which `slots` [...] hold what they held when row `newest` was the newest."""
        row = newest - (newest - slots // self._storage.streams) % self._storage.ring
        return np.asarray(row >= self.oldest)

    def state(self) -> Tensors:
        """Return the priorities [P, S] of the rows of the ring that were written, their maxima and whose they are."""
        self.drop()
        self.insert()
        held = rows_held(self._storage.written, self._storage.ring) * self._storage.streams
        return {
            "priorities": torch.from_numpy(self.tree.leaves[:, :held].copy()),
            "priorities.maximum": torch.from_numpy(self.maximum.copy()),
            "priorities.agents": torch.tensor(self._agents, dtype=torch.int64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> None:
        """Take over what `state` gave beside a storage of these `numbers`, which has been restored.

        Where the storage could not be restored as it was, all is new. Raises UserError for what nothing could have
        given.
        """
        storage = self._storage
        same = all(numbers[name] == getattr(storage, name) for name in ("rows", "streams", "written", "oldest"))
        held = rows_held(numbers["written"], numbers["rows"] + storage.depth) * numbers["streams"]
        whose = tensors.get("priorities.agents", torch.empty(0))
        agents = len(self.maximum) if same or not whose.dim() else len(whose)
        expected = {
            "priorities": ((agents, held), torch.float64),
            "priorities.maximum": ((agents,), torch.float64),
            "priorities.agents": ((agents,), torch.int64),
        }
        check_tensors(tensors, expected, WHERE)
        leaves, maximum = tensors["priorities"].numpy(), tensors["priorities.maximum"].numpy()
        if not (np.isfinite(leaves).all() and (leaves >= 0).all()):
            raise UserError(f"{WHERE}: tensor 'priorities' holds what is no priority")
        if not (np.isfinite(maximum).all() and (maximum > 0).all() and (leaves <= maximum[:, None]).all()):
            raise UserError(f"{WHERE}: tensor 'priorities.maximum' holds what is no largest priority")
        if not same:
            return
        drawable = storage.can_draw(torch.arange(held, device=storage.device)).cpu().numpy()
        if (leaves[:, ~drawable] > 0).any() or (self._shared and (leaves[:, drawable] == 0).any()):
            raise UserError(f"{WHERE}: tensor 'priorities' does not fit what can be drawn")
        self.tree.fill(0, held, leaves)
        self.maximum, self._agents = maximum.copy(), tensors["priorities.agents"].tolist()
        self.oldest, self._newest = storage.oldest, storage.written

    def _rows(self, first: int, last: int) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
        """Yield the slots of rows, from one to another, and which of them [P, S] each agent may draw."""
        storage = self._storage
        for start, stop in self._pieces(first, last):
            mask = np.tile(self._may_draw, (stop - start) // storage.streams)
            if storage.gaps.held:
                mask &= storage.flags["valid"].view(-1)[start:stop].cpu().numpy()
            yield start, stop, mask

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the slots of the rows from `first` on and before `last`, from one to another without a break."""
        ring, streams = self._storage.ring, self._storage.streams
        first = max(first, last - ring)
        while first < last:
            row = first % ring
            count = min(last - first, ring - row)
            yield row * streams, (row + count) * streams
            first += count
