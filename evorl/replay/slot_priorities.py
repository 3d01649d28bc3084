"""Priorities of a storage's slots, added and dropped row by row.

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
"""Initial maximum priority, used until an agent has set one."""


class SlotPriorities:
    """Each agent's priority of every slot it may draw; all others have 0.

    Rows gain and lose priorities only when asked, not when the storage changes, so that earlier draws can still be
    updated. A new transition gets the largest priority that its agent has set so far.
    """

    def __init__(self, storage: Storage, agents: int, shared: bool) -> None:
        """Start empty. Unless `shared`, an agent may draw only from its own N / P streams."""
        self.tree = PriorityTree(agents, storage.slots)
        self.maximum = np.full(agents, FIRST_PRIORITY)
        """The largest priority [P] ever set."""
        self.oldest = 0
        """Number of the first row with priorities."""
        self._newest = 0
        """Number of the first row without priorities yet."""
        self._storage = storage
        self._shared = shared
        owner = np.arange(storage.streams) * agents // storage.streams
        self._may_draw = (owner == np.arange(agents)[:, None]) | shared
        self._agents: list[int] = []

    def begin(self, agents: list[tuple[int, int | None]]) -> None:
        """Pass the priorities on to these agents, given as (id, parent id).

        An agent keeps its own priorities, or inherits its parent's. If neither is here, every transition is new to it.
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
        """Return the number of transitions [P] written but without a priority."""
        rows = self._rows(self._newest, self._storage.written)
        return sum((mask.sum(1) for _, _, mask in rows), np.zeros(len(self.maximum)))

    def insert(self, priority: Floats | None = None) -> None:
        """Give new rows the largest priority, or the given priorities [T, N] of the T newest rows."""
        storage = self._storage
        if priority is not None:
            # A ring with fewer rows has kept only the last of them.
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
        """Set `slots` [P, K] to priorities [P, K] `where` [P, K]; the last of duplicate slots counts."""
        self.maximum = np.maximum(self.maximum, np.max(priority, 1, where=where, initial=0.0))
        self.tree.set(slots, priority, where)

    def stands(self, slots: Integers, newest: int) -> NDArray[np.bool_]:
        """Return a mask of `slots` [...] not overwritten since row `newest` was the newest."""
        row = newest - (newest - slots // self._storage.streams) % self._storage.ring
        return np.asarray(row >= self.oldest)

    def state(self) -> Tensors:
        """Return the priorities [P, S] of the written rows of the ring, the maxima, and the agents' ids."""
        self.drop()
        self.insert()
        held = rows_held(self._storage.written, self._storage.ring) * self._storage.streams
        return {
            "priorities": torch.from_numpy(self.tree.leaves[:, :held].copy()),
            "priorities.maximum": torch.from_numpy(self.maximum.copy()),
            "priorities.agents": torch.tensor(self._agents, dtype=torch.int64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> None:
        """Restore from `state`, after a storage with these `numbers` has been restored.

        If the storage's layout changed, all transitions are new. Raises UserError for an invalid state.
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
        """Yield slot ranges of the rows `first` to `last`, with the mask [P, S] of slots that each agent may draw."""
        storage = self._storage
        for start, stop in self._pieces(first, last):
            mask = np.tile(self._may_draw, (stop - start) // storage.streams)
            if storage.gaps.held:
                mask &= storage.flags["valid"].view(-1)[start:stop].cpu().numpy()
            yield start, stop, mask

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield contiguous slot ranges of the rows `first` to `last` (excluded)."""
        ring, streams = self._storage.ring, self._storage.streams
        first = max(first, last - ring)
        while first < last:
            row = first % ring
            count = min(last - first, ring - row)
            yield row * streams, (row + count) * streams
            first += count
