"""A ring of transitions in preallocated memory. Axes: N transitions, P agents, E environments."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from evorl.system.formats import check_tensors
from evorl.types import Tensors, UserError


class ReplayBuffer:
    """The newest `capacity` transitions of this rank, whichever agent made them.

    `fields` gives each field's shape and type; memory is taken once, at the start.
    """

    def __init__(
        self, capacity: int, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        self.capacity = capacity
        self.device = device
        self.size = 0
        self._next = 0
        self.storage: Tensors = {
            name: torch.zeros((capacity, *shape), dtype=dtype, device=device) for name, (shape, dtype) in fields.items()
        }

    @property
    def full(self) -> bool:
        """Whether the oldest give way from now on."""
        return self.size == self.capacity

    def begin(self) -> None:
        """Start a generation; transitions need not follow each other here."""

    def add_step(self, fields: Mapping[str, Tensor], valid: Tensor, started: Tensor) -> None:
        """Append the transitions of one step of all copies, fields [P, E, ...], where they are `valid` [P, E]."""
        rows = {name: value.flatten(0, 1) for name, value in fields.items()}
        if not valid.all():
            kept = valid.flatten()
            rows = {name: value[kept] for name, value in rows.items()}
        self.add(rows)

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Append rows [N, ...]; the oldest give way. Of more than `capacity` rows the last ones stay."""
        count = next(iter(rows.values())).shape[0]
        skipped = max(0, count - self.capacity)
        count -= skipped
        first = min(count, self.capacity - self._next)
        for name, store in self.storage.items():
            values = rows[name][skipped:]
            store[self._next : self._next + first] = values[:first]
            store[: count - first] = values[first:]
        self._next = (self._next + count) % self.capacity
        self.size = min(self.size + count, self.capacity)

    def gather(self, index: Tensor) -> Tensors:
        """The transitions at `index` [...], as fields [..., ...]."""
        flat = index.reshape(-1)
        return {
            name: store.index_select(0, flat).view(*index.shape, *store.shape[1:])
            for name, store in self.storage.items()
        }

    def newest(self) -> Tensors:
        """The transition that was added last, as fields [1, ...]."""
        return self.gather(torch.tensor([(self._next - 1) % self.capacity], device=self.device))

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """What a checkpoint keeps: the rows held, and where the ring stands."""
        rows = {name: store[: self.size] for name, store in self.storage.items()}
        return rows, {"size": self.size, "next": self._next, "capacity": self.capacity}

    def restore(self, rows: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Take over what `state` gave: exactly into an empty ring of the same capacity, else appended, oldest first.

        Raises UserError for what no ring of these fields could have given.
        """
        size, place, capacity = (numbers.get(name, -1) for name in ("size", "next", "capacity"))
        if not (0 <= size <= capacity and (place == size % capacity if size < capacity else 0 <= place < capacity)):
            raise UserError(f"{size} rows, the next at {place}, are no state of a ring of {capacity}")
        fields = {name: ((size, *store.shape[1:]), store.dtype) for name, store in self.storage.items()}
        check_tensors(rows, fields, "the replay")
        rows = {name: value.to(self.device) for name, value in rows.items()}
        if self.size or numbers["capacity"] != self.capacity:
            full = numbers["size"] == numbers["capacity"]
            self.add({name: value.roll(-numbers["next"], 0) if full else value for name, value in rows.items()})
            return
        self.size, self._next = numbers["size"], numbers["next"]
        for name, store in self.storage.items():
            store[: self.size] = rows[name]
