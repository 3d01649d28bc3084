"""Lanes of random episodes in plain Python, and what a storage that was told of them must hold.

Axes: T rows, N lanes, F frames.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st

from evorl.replay.storage import Storage
from helpers.support import fields_of

CPU = torch.device("cpu")
HISTORIES = {
    "seed": st.integers(0, 2**20),
    "lanes": st.integers(1, 4),
    "rows": st.integers(1, 12),
    "frames": st.integers(0, 4),
    "resets_in_step": st.booleans(),
    "plan": st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["go on", "carry over", "anew"])), max_size=5),
}
"""Storages of every small shape, and what happens in them: so many steps, and what follows them."""
COLUMNS = {"number": ((), torch.int64), "terminated": ((), torch.bool)}


def part(shape=(2,), dtype=torch.float32, frames=0):
    return SimpleNamespace(shape=shape, dtype=dtype, frames=frames)


def storage(rows=6, lanes=3, frames=0, **settings):
    parts = {"position": part()}
    if frames:
        parts["picture"] = part((frames, 2), torch.int32, frames)
    return Storage(rows, lanes, parts, COLUMNS, CPU, **settings)


@dataclass
class Step:
    """What one step of one lane was, in plain Python."""

    number: int
    before: dict
    after: dict
    valid: bool
    terminated: bool
    last: bool = False
    """Whether the lane's next step does not go on with this one."""


@dataclass
class World:
    """Lanes of random episodes that write down everything they do; environments reset within a step or after it."""

    lanes: int
    frames: int
    seed: int
    resets_in_step: bool
    steps: list = field(default_factory=list)
    """For each row the steps [N]."""
    layout: list = field(default_factory=list)
    """The same with empty rows where stacks take one for older frames, or for the last one."""
    broken: bool = True

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.number = 0
        self.resetting = [False] * self.lanes
        self.reset()

    def reset(self):
        self.history = [[] for _ in range(self.lanes)]
        self.started = [True] * self.lanes
        for lane in range(self.lanes):
            self.look(lane)
        self.resetting = [False] * self.lanes

    def look(self, lane):
        """See something that was never seen before."""
        self.number += 1
        self.history[lane].append(self.number)

    def shown(self, lane):
        newest = self.history[lane][-1]
        seen = {"position": [newest + 0.25, -float(newest)]}
        if self.frames:
            stack = ([0] * self.frames + self.history[lane])[-self.frames :]
            seen["picture"] = [[number, number + 1 if number else 0] for number in stack]
        return seen

    def step(self, calm=False):
        """Act everywhere, and return the arguments of `write` with the steps."""
        row, started = [], list(self.started)
        for lane in range(self.lanes):
            before, resets = self.shown(lane), self.resetting[lane]
            chance = self.random.random(2) if not calm else np.ones(2)
            ends = chance[0] < 0.2 and not resets
            terminated = bool(ends and chance[1] < 0.5)
            if resets:
                self.history[lane] = []
            self.look(lane)
            after = self.shown(lane)
            if ends and self.resets_in_step:
                self.history[lane] = []
                self.look(lane)
            self.started[lane] = resets or (ends and self.resets_in_step)
            self.resetting[lane] = ends and not self.resets_in_step
            row.append(Step(self.number, before, after, not resets, terminated, last=bool(ends)))
        return row, started

    def play(self, store, steps, calm=False):
        """Take so many steps, and write them; return the slots [T, N]."""
        slots = []
        for _ in range(steps):
            row, started = self.step(calm)
            slots.append(write(store, row, started))
            self.append(row, started)
        return torch.stack(slots) if slots else torch.zeros(0, self.lanes)

    def append(self, row, started):
        if not self.broken:
            for step, begins in zip(self.steps[-1], started, strict=True):
                step.last |= begins
        elif not all(started):
            self.layout += [[]] * (self.frames - 1)
        self.steps.append(row)
        self.layout.append(row)
        self.broken = False

    def end(self, store, fresh):
        """Break the lanes, which then begin anew or go on."""
        store.break_lanes()
        if self.frames > 1 and not self.broken:
            self.layout.append([])
        for step in self.steps[-1] if self.steps else []:
            step.last = True
        self.broken = True
        if fresh:
            self.reset()


def batched(seen):
    types = {"position": torch.float32, "picture": torch.int32}
    return {name: torch.tensor([one[name] for one in seen], dtype=types[name]) for name in seen[0]}


def write(store, row, started):
    """Write a step of each lane; return the slots [N]."""
    columns = {
        "number": torch.tensor([step.number for step in row]),
        "terminated": torch.tensor([step.terminated for step in row]),
    }
    store.write(
        batched([step.before for step in row]),
        columns,
        next_observation=batched([step.after for step in row]),
        valid=torch.tensor([step.valid for step in row]),
        started=torch.tensor(started),
        ended=torch.tensor([step.last for step in row]),
    )
    return store.newest_row * store.lanes + torch.arange(store.lanes)


def everything(store):
    """All slots that can be drawn, and the transitions at them by their number."""
    slots = store.valid_index()
    found = store.gather(slots)
    fields = fields_of(found)
    return slots, {
        number: {name: values[at].tolist() for name, values in fields.items()}
        for at, number in enumerate(found.columns["number"].tolist())
    }


def expected(step):
    wanted = {"number": step.number, "terminated": step.terminated}
    wanted |= {f"observation.{name}": value for name, value in step.before.items()}
    return wanted | {f"next_observation.{name}": value for name, value in step.after.items()}


def check(store, steps):
    """Compare all that can be drawn with the steps [T, N] that happened, and return the numbers of what is there."""
    slots, found = everything(store)
    known = {step.number: step for row in steps for step in row}
    assert len(found) == store.drawable == len(slots.unique()), "each is there once"
    for number, transition in found.items():
        assert known[number].valid
        assert transition == expected(known[number])
    for name, values in store.observation(slots).items():
        assert torch.equal(values, store.gather(slots).observation[name])
    for name, values in store.next_observation(slots).items():
        assert torch.equal(values, store.gather(slots).next_observation[name])
    return set(found)


def check_ends(store, steps, n):
    """Compare how far n-step returns may reach with the steps that happened."""
    slots, _ = everything(store)
    place = {step.number: (row, lane) for row, own in enumerate(steps) for lane, step in enumerate(own)}
    numbers = store.gather(slots).columns["number"].tolist()
    for number, slot, end in zip(numbers, slots.tolist(), store.window_end(slots, n).tolist(), strict=True):
        row, lane = place[number]
        wanted = 1
        while wanted < n and row + wanted < len(steps) and not steps[row + wanted - 1][lane].last:
            wanted += 1
        assert end == wanted
        along = store.following(torch.tensor([slot] * end), torch.arange(end))
        there = store.gather(along).columns["number"].tolist()
        assert there == [steps[row + step][lane].number for step in range(end)]
        last = store.next_observation(along[-1])["position"].tolist()
        assert last == steps[row + end - 1][lane].after["position"]


def newest(steps, rows):
    return {step.number for row in steps[max(0, len(steps) - rows) :] for step in row if step.valid}
