"""Replay of stacked frames, each frame kept once.

Axes: T steps kept, C copies of the environment (P agents times E environments), F frames of a stack, N transitions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from evorl.system.formats import check_tensors
from evorl.types import EvorlWarning, Tensors, UserError

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class FrameReplay:
    """The newest steps of environments that show their last F frames, the newest last, and spend a step on a reset.

    Row t of the ring holds the newest frame that step t led to. The stack before the step ends with row t - 1, the one
    after it with row t; both show zeros for what lies before the episode's first frame. A reset step's row holds that
    first frame, and the rows before a generation's first step hold the stack that it began with; none of them is a
    transition. A million transitions of 84x84 take 7 GB rather than 56.
    """

    def __init__(self, capacity: int, frames: Mapping[str, int], fields: Fields, device: torch.device) -> None:
        """`capacity` in transitions; `frames` gives each stacked part's F, `fields` shape and type of all fields."""
        self.capacity = capacity
        self.device = device
        self._frames = dict(frames)
        self._depth = max(frames.values())
        self._fields = dict(fields)
        self._store: Tensors = {}
        self._steps = 0
        """Rows written since the beginning."""
        self._first_step = True
        self._drawable: Tensor | None = None

    @property
    def size(self) -> int:
        """How many transitions can be drawn."""
        return len(self._positions())

    @property
    def full(self) -> bool:
        """Whether the oldest give way from now on."""
        return bool(self._store) and self._steps >= self._rows

    def begin(self) -> None:
        """Start a generation: what comes next does not follow what came last."""
        self._first_step = True

    def add_step(self, fields: Mapping[str, Tensor], valid: Tensor, started: Tensor) -> None:
        """Append one step of all copies, fields [P, E, ...]; `started` [P, E] where what was seen began an episode."""
        rows = {name: value.flatten(0, 1) for name, value in fields.items()}
        if not self._store or len(self._store["valid"][0]) != valid.numel():
            self._allocate(valid.numel())
        if self._first_step:
            self._write_first_stack(rows)
        kept = {name: value for name, value in rows.items() if name in self._store}
        kept |= {f"frame.{part}": rows[f"next_observation.{part}"][:, -1] for part in self._frames}
        self._write(kept, valid.flatten(), started.flatten())

    def gather(self, index: Tensor) -> Tensors:
        """The transitions at `index` [...], as fields [..., ...]."""
        positions = self._positions()[index.flatten()]
        gathered = {
            name: self._store[name].flatten(0, 1).index_select(0, positions).view(*index.shape, *self._fields[name][0])
            for name in self._fields
            if name in self._store
        }
        for part, depth in self._frames.items():
            for prefix, ago in (("observation.", 1), ("next_observation.", 0)):
                stacks = self._stacks(f"frame.{part}", positions, depth, ago)
                gathered[prefix + part] = stacks.view(*index.shape, *stacks.shape[1:])
        return gathered

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """What a checkpoint keeps: the rows held, and where the ring stands."""
        held = min(self._steps, self._rows)
        rows = {name: store[:held] for name, store in self._store.items()}
        return rows, {"steps": self._steps, "rows": self._rows}

    def restore(self, rows: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Take over what `state` gave into an empty ring of the same shape; else it is left out, and said so.

        Raises UserError for what no ring of these fields could have given.
        """
        if not rows:
            return
        steps, ring = (numbers.get(name, -1) for name in ("steps", "rows"))
        if "valid" not in rows or rows["valid"].dim() != 2 or min(steps, ring, *rows["valid"].shape) < 1:
            raise UserError(f"{steps} steps in {ring} rows are no state of a ring of frames")
        copies = rows["valid"].shape[1]
        held = min(steps, ring)
        fields = {name: ((held, copies, *shape), dtype) for name, (shape, dtype) in self._kept().items()}
        check_tensors(rows, fields, "the replay")
        if self._store or self._ring(copies) != numbers["rows"]:
            warnings.warn("a part of the replay has another shape and is not taken over", EvorlWarning, stacklevel=2)
            return
        self._allocate(copies)
        self._steps = numbers["steps"]
        for name, store in self._store.items():
            store[: len(rows[name])] = rows[name].to(self.device)

    @property
    def _rows(self) -> int:
        return len(self._store["valid"]) if self._store else 0

    def _ring(self, copies: int) -> int:
        """Rows that hold `capacity` transitions, with the frames before the oldest."""
        return max(1, self.capacity // copies) + self._depth

    def _allocate(self, copies: int) -> None:
        rows = self._ring(copies)
        self._store = {
            name: torch.zeros((rows, copies, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in self._kept().items()
        }
        self._steps, self._first_step, self._drawable = 0, True, None

    def _kept(self) -> Fields:
        """Shape and type of what is kept of every copy at every step."""
        kept = {name: field for name, field in self._fields.items() if not self._is_stack(name)}
        for part in self._frames:
            shape, dtype = self._fields[f"observation.{part}"]
            kept[f"frame.{part}"] = shape[1:], dtype
        return kept | {"valid": ((), torch.bool), "first": ((), torch.int64)}

    def _is_stack(self, field: str) -> bool:
        return field.partition(".")[2] in self._frames

    def _write_first_stack(self, fields: Mapping[str, Tensor]) -> None:
        """Keep the stacks, in fields [C, ...], that a generation begins with: episodes may have begun before it."""
        nothing = torch.zeros(len(next(iter(fields.values()))), dtype=torch.bool, device=self.device)
        first = self._steps
        for ago in range(self._depth, 0, -1):
            frames = {
                f"frame.{part}": fields[f"observation.{part}"][:, -min(ago, depth)]
                for part, depth in self._frames.items()
            }
            self._write(frames, nothing, nothing)
            self._store["first"][(self._steps - 1) % self._rows] = first
        self._first_step = False

    def _write(self, rows: Mapping[str, Tensor], valid: Tensor, started: Tensor) -> None:
        row = self._steps % self._rows
        for name, values in rows.items():
            self._store[name][row] = values
        before = self._store["first"][row - 1]
        self._store["first"][row] = torch.where(started, self._steps - 1, before)
        self._store["valid"][row] = valid
        self._steps += 1
        self._drawable = None

    def _positions(self) -> Tensor:
        """Where in the ring, row * C + copy, the transitions [N] stand whose frames are all there."""
        if self._drawable is None:
            if not self._store:
                return torch.zeros(0, dtype=torch.int64, device=self.device)
            valid = self._store["valid"].clone()
            if self._steps > self._rows:
                oldest = torch.arange(self._steps, self._steps + self._depth, device=self.device) % self._rows
                valid[oldest] = False
            self._drawable = valid.flatten().nonzero().squeeze(-1)
        return self._drawable

    def _stacks(self, name: str, positions: Tensor, depth: int, ago: int) -> Tensor:
        """The stacks [N, F, ...] that end `ago` rows before the transitions' rows."""
        copies = self._store["valid"].shape[1]
        row, copy = positions // copies, positions % copies
        # The number of each row since the beginning, from its place in the ring.
        newest = self._steps - 1
        number = newest - (newest - row) % self._rows
        wanted = number.unsqueeze(-1) - ago - torch.arange(depth - 1, -1, -1, device=self.device)
        first = self._store["first"].flatten()[positions].unsqueeze(-1)
        flat = (wanted % self._rows * copies + copy.unsqueeze(-1)).flatten()
        stacks = self._store[name].flatten(0, 1).index_select(0, flat)
        stacks[(wanted < first).flatten()] = 0
        return stacks.view(len(positions), depth, *stacks.shape[1:])
