"""One storage for replay and rollouts: what is drawn is what happened, against lists that keep everything.

Axes: T rows, N streams, F frames.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evorl.replay.buffer import ReplayBuffer
from evorl.replay.frames import FrameReplay
from evorl.replay.storage import Storage
from evorl.types import UserError

CPU = torch.device("cpu")
COLUMNS = {"number": ((), torch.int64), "terminated": ((), torch.bool)}


def part(shape=(2,), dtype=torch.float32, frames=0):
    return SimpleNamespace(shape=shape, dtype=dtype, frames=frames)


def storage(rows=6, streams=3, frames=0, **settings):
    parts = {"position": part()}
    if frames:
        parts["picture"] = part((frames, 2), torch.int32, frames)
    return Storage(rows, streams, parts, COLUMNS, CPU, **settings)


@dataclass
class Step:
    """What one step of one stream was, in plain Python."""

    number: int
    before: dict
    after: dict
    valid: bool
    terminated: bool
    last: bool = False
    """Whether the stream's next step does not go on with this one."""


@dataclass
class World:
    """Streams of random episodes that write down everything they do; environments reset within a step or after it."""

    streams: int
    frames: int
    seed: int
    resets_in_step: bool
    drops: bool = True
    steps: list = field(default_factory=list)
    """For each row the steps [N]."""
    layout: list = field(default_factory=list)
    """The same with empty rows where stacks take one for older frames, or for the last one."""
    broken: bool = True

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.number = 0
        self.resetting = [False] * self.streams
        self.reset()

    def reset(self):
        self.history = [[] for _ in range(self.streams)]
        self.started = [True] * self.streams
        for stream in range(self.streams):
            self.look(stream)
        self.resetting = [False] * self.streams

    def look(self, stream):
        """See something that was never seen before."""
        self.number += 1
        self.history[stream].append(self.number)

    def shown(self, stream):
        newest = self.history[stream][-1]
        seen = {"position": [newest + 0.25, -float(newest)]}
        if self.frames:
            stack = ([0] * self.frames + self.history[stream])[-self.frames :]
            seen["picture"] = [[number, number + 1 if number else 0] for number in stack]
        return seen

    def step(self, calm=False):
        """Act everywhere, and return the arguments of `write` with the steps."""
        row, started = [], list(self.started)
        for stream in range(self.streams):
            before, resets = self.shown(stream), self.resetting[stream]
            chance = self.random.random(3) if not calm else np.ones(3)
            ends = chance[0] < 0.2 and not resets
            dropped = self.drops and chance[1] < 0.07 and not ends and not resets
            terminated = bool(ends and chance[2] < 0.5)
            if resets or dropped:
                self.history[stream] = []
            self.look(stream)
            after = self.shown(stream)
            if ends and self.resets_in_step:
                self.history[stream] = []
                self.look(stream)
            self.started[stream] = resets or dropped or (ends and self.resets_in_step)
            self.resetting[stream] = ends and not self.resets_in_step
            row.append(Step(self.number, before, after, not (resets or dropped), terminated, last=bool(ends)))
        return row, started

    def play(self, store, steps, calm=False):
        """Take so many steps, and write them; return the slots [T, N]."""
        slots = []
        for _ in range(steps):
            row, started = self.step(calm)
            slots.append(write(store, row, started))
            self.append(row, started)
        return torch.stack(slots) if slots else torch.zeros(0, self.streams)

    def append(self, row, started):
        if not self.broken:
            for stream, (step, begins) in enumerate(zip(row, started, strict=True)):
                self.steps[-1][stream].last |= begins or not step.valid
        elif not all(started):
            self.layout += [[]] * (self.frames - 1)
        self.steps.append(row)
        self.layout.append(row)
        self.broken = False

    def end(self, store, fresh):
        """Break the streams, which then begin anew or go on."""
        store.break_streams()
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
    columns = {
        "number": torch.tensor([step.number for step in row]),
        "terminated": torch.tensor([step.terminated for step in row]),
    }
    return store.write(
        batched([step.before for step in row]),
        columns,
        next_observation=batched([step.after for step in row]),
        valid=torch.tensor([step.valid for step in row]),
        started=torch.tensor(started),
        ended=torch.tensor([step.last for step in row]),
    )


def everything(store):
    """All slots that can be drawn, and the transitions at them by their number."""
    slots = store.nth(torch.arange(store.drawable))
    found = store.gather(slots)
    return slots, {
        number: {name: values[at].tolist() for name, values in found.items()}
        for at, number in enumerate(found["number"].tolist())
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
    assert store.can_draw(slots).all()
    every = torch.arange(store.slots)
    assert store.can_draw(every).sum() == store.drawable, "and nothing else is"
    for number, transition in found.items():
        assert known[number].valid
        assert transition == expected(known[number])
    for name, values in (store.observation(slots) | {}).items():
        assert torch.equal(values, store.gather(slots)[f"observation.{name}"])
    for name, values in store.next_observation(slots).items():
        assert torch.equal(values, store.gather(slots)[f"next_observation.{name}"])
    return set(found)


def check_ends(store, steps, n):
    """Compare how far n-step returns may reach with the steps that happened."""
    slots, _ = everything(store)
    place = {step.number: (row, stream) for row, own in enumerate(steps) for stream, step in enumerate(own)}
    numbers = store.gather(slots)["number"].tolist()
    for number, slot, end in zip(numbers, slots.tolist(), store.window_end(slots, n).tolist(), strict=True):
        row, stream = place[number]
        wanted = 1
        while wanted < n and row + wanted < len(steps) and not steps[row + wanted - 1][stream].last:
            wanted += 1
        assert end == wanted
        along = store.following(torch.tensor([slot] * end), torch.arange(end))
        there = store.gather(along)["number"].tolist()
        assert there == [steps[row + step][stream].number for step in range(end)]
        last = store.next_observation(along[-1])["position"].tolist()
        assert last == steps[row + end - 1][stream].after["position"]


def newest(steps, rows):
    return {step.number for row in steps[max(0, len(steps) - rows) :] for step in row if step.valid}


@given(
    seed=st.integers(0, 2**20),
    streams=st.integers(1, 4),
    rows=st.integers(1, 12),
    frames=st.integers(0, 4),
    resets_in_step=st.booleans(),
    plan=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["go on", "carry over", "anew"])), max_size=5),
)
@settings(max_examples=120, deadline=None)
def test_what_is_drawn_is_what_happened(seed, streams, rows, frames, resets_in_step, plan):
    world = World(streams, frames, seed, resets_in_step)
    store = storage(rows, streams, frames)
    for steps, then in plan:
        world.play(store, steps)
        found = check(store, world.steps)
        assert found == newest(world.layout, rows)
        check_ends(store, world.steps, n=1 + seed % 5)
        if then != "go on":
            world.end(store, fresh=then == "anew")
            assert check(store, world.steps) == newest(world.layout, rows)


@pytest.mark.parametrize("frames", [0, 3])
def test_slots_keep_what_they_hold_until_they_are_written_again(frames):
    world, store, where = World(3, frames, 1, True), storage(7, 3, frames), {}
    for step in range(40):
        slots = world.play(store, 1)[0].tolist()
        assert slots == list(range(slots[0], slots[0] + 3))
        assert slots[0] // 3 == store.newest_row
        where |= dict(zip(slots, (one.number for one in world.steps[-1]), strict=True))
        drawn, _ = everything(store)
        numbers = store.gather(drawn)["number"].tolist()
        assert [where[slot] for slot in drawn.tolist()] == numbers == sorted(numbers)
        if step % 9 == 8:
            world.end(store, fresh=step % 2 == 0)


@given(st.integers(0, 2**20), st.integers(1, 5), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_the_kth_slot_is_the_kth_that_can_be_drawn(seed, streams, share):
    """Also where hardly anything or nothing is valid; so draws are uniform exactly where their indices are."""
    random, store, valid = np.random.default_rng(seed), storage(9, streams), []
    for _ in range(50):
        own = random.random(streams) < share
        shown = {"position": torch.zeros(streams, 2)}
        columns = {"number": torch.zeros(streams).long(), "terminated": torch.zeros(streams, dtype=torch.bool)}
        flags = {"started": torch.zeros(streams, dtype=torch.bool), "ended": columns["terminated"]}
        slots = store.write(shown, columns, next_observation=shown, valid=torch.from_numpy(own), **flags)
        valid.append(slots[torch.from_numpy(own)].tolist())
        expected = [slot for row in valid[-9:] for slot in row]
        assert store.drawable == len(expected)
        assert store.nth(torch.arange(len(expected))).tolist() == expected
        assert store.nth(torch.arange(len(expected)).flip(0).view(-1, 1)).tolist() == [[s] for s in expected[::-1]]


def test_a_ring_that_is_given_its_memory_drops_old_rows_where_there_are_too_many_last_observations():
    taken = []

    def empty(shape, dtype):
        taken.append(torch.full(shape, 77).to(dtype))
        return taken[-1]

    world, store = World(2, 0, 5, True, drops=False), storage(40, 2, empty=empty, last=4)
    assert store.memory == sum(tensor.nbytes for tensor in taken)
    dropped = 0
    for _ in range(150):
        world.play(store, 1)
        found = check(store, world.steps)
        held = store.written - store.oldest
        assert found == newest(world.steps, held)
        ends = sum(step.last for row in world.steps[-held:-1] for step in row)
        assert ends <= 4
        dropped += held < min(store.written, 40)
    assert dropped > 50
    assert store.memory == sum(tensor.nbytes for tensor in taken), "nothing more was taken"
    with pytest.raises(ValueError, match="cannot grow"):
        storage(empty=empty)
    with pytest.raises(ValueError, match="room for 2"):
        storage(last=2)


def test_windows_are_views_of_the_rows():
    world, store = World(3, 0, 2, True), storage(5, 3)
    world.play(store, 5)
    seen = store.window(0, 5)
    numbers = [[step.number for step in row] for row in world.steps]
    assert seen["number"].tolist() == numbers
    assert seen["observation.position"].tolist() == [[step.before["position"] for step in row] for row in world.steps]
    assert seen["valid"].tolist() == [[step.valid for step in row] for row in world.steps]
    assert seen["boundary"][:-1].tolist() == [[step.last for step in row] for row in world.steps[:-1]]
    assert all(values.is_contiguous() for values in seen.values())
    seen["number"][1, 1] = -5
    assert store.gather(torch.tensor(4))["number"] == -5, "no copy"
    with pytest.raises(ValueError, match="one piece"):
        store.window(2, 5)


@pytest.mark.parametrize("frames", [0, 3])
@pytest.mark.parametrize("store_next", [False, True])
def test_a_rollout_begins_at_the_first_row_again_after_it_is_cleared(frames, store_next):
    world, store = World(2, frames, 3, True), storage(6, 2, frames, store_next=store_next)
    for rollout in range(4):
        store.clear()
        slots = world.play(store, 6)
        rows = world.steps[-6:]
        assert store.newest_row + 1 - 6 == slots[0, 0] // 2 == (frames - 1 if frames and rollout else 0)
        found = store.gather(slots)
        assert found["number"].tolist() == [[step.number for step in row] for row in rows]
        for name in store.parts:
            wanted = [[step.before[name] for step in row] for row in rows]
            assert found[f"observation.{name}"].tolist() == wanted
        assert ("next_observation.position" in found) == store_next
        assert store.window(store.newest_row - 5, 6)["number"].tolist() == found["number"].tolist()


@pytest.mark.parametrize("frames", [0, 3])
def test_a_device_is_never_waited_for(frames):
    """Tensors on `meta` have no values: whoever looks at one raises. Flags stand on the CPU."""
    meta = torch.device("meta")
    parts = {"position": part(), "picture": part((3, 2), torch.int32, 3)} if frames else {"position": part()}
    store, fine, never = Storage(6, 4, parts, COLUMNS, meta), torch.ones(4, dtype=torch.bool), torch.zeros(4).bool()
    shown = {name: torch.empty((4, *kept.shape), dtype=kept.dtype, device=meta) for name, kept in parts.items()}
    columns = {name: torch.empty((4, *shape), dtype=dtype, device=meta) for name, (shape, dtype) in COLUMNS.items()}
    for step in range(20):
        started = torch.arange(4) == step % 8 if step else fine
        store.write(shown, columns, next_observation=shown, valid=fine, started=started, ended=never.to(meta))
        slots = store.nth(torch.randint(store.drawable, (2, 5), device=meta))
        assert store.gather(slots)["next_observation.position"].shape == (2, 5, 2)
        assert store.window_end(slots, 3).shape == (2, 5)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        store.gather(slots)["number"].tolist()


def copied(state):
    tensors, numbers = state
    return {name: value.clone() for name, value in tensors.items()}, dict(numbers)


@pytest.mark.parametrize("frames", [0, 1, 3])
@pytest.mark.parametrize("resets_in_step", [False, True])
@pytest.mark.parametrize("steps", [0, 3, 30])
def test_a_restored_storage_draws_the_same_and_goes_on(frames, resets_in_step, steps):
    world = World(3, frames, 4, resets_in_step)
    first, second = storage(8, 3, frames), storage(8, 3, frames)
    for _ in range(2):
        world.play(first, steps)
        world.end(first, fresh=False)
    world.play(first, steps // 2)
    second.restore(*copied(first.state()))
    for _ in range(12):
        index = torch.randint(max(1, first.drawable), (4, 5))
        assert first.drawable == second.drawable
        assert torch.equal(first.nth(index), second.nth(index))
        if first.drawable:
            torch.testing.assert_close(first.gather(first.nth(index)), second.gather(second.nth(index)), rtol=0, atol=0)
        again, began = copied(first.state()), copied(second.state())
        assert again[1] == began[1]
        assert again[0].keys() == began[0].keys()
        assert all(torch.equal(again[0][name], began[0][name]) for name in again[0])
        row, started = world.step()
        assert torch.equal(write(first, row, started), write(second, row, started))
        world.append(row, started)
        check(second, world.steps)


@given(
    seed=st.integers(0, 2**20),
    before=st.tuples(st.integers(1, 12), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 30), st.integers(1, 6)),
    frames=st.integers(0, 3),
    resets_in_step=st.booleans(),
    steps=st.integers(0, 20),
)
@settings(max_examples=120, deadline=None)
def test_a_storage_of_another_shape_takes_over_what_fits(seed, before, after, frames, resets_in_step, steps):
    world = World(before[1], frames, seed, resets_in_step)
    source, target = storage(before[0], before[1], frames), storage(*after, frames)
    world.play(source, steps // 2)
    world.end(source, fresh=seed % 2 == 0)
    world.play(source, steps - steps // 2)
    held, twice = check(source, world.steps), seed % 3 == 0
    for _ in range(1 + twice):
        target.restore(*copied(source.state()))
    slots, found = everything(target)
    known = {step.number: step for row in world.steps for step in row}
    assert set(found) <= held
    assert all(transition == expected(known[number]) for number, transition in found.items())
    rows = source.written - source.oldest
    if before == after and not twice:
        assert set(found) == held
    elif before[1] == after[1] and not twice:
        # Streams stay what they are; where they break, stacks take a row for the last observation.
        assert set(found) == held & newest(world.layout, after[0] - (frames > 1))
    elif not twice and rows * before[1] * 2 + 8 * frames * after[1] < after[0] * after[1]:
        assert set(found) == held, "all are there where there is plenty of room"
    ends = target.window_end(slots, 3).tolist()
    place = {step.number: (row, stream) for row, own in enumerate(world.steps) for stream, step in enumerate(own)}
    for slot, end in zip(slots.tolist(), ends, strict=True):
        along = store_numbers(target, slot, end)
        row, stream = place[along[0]]
        assert along == [world.steps[row + step][stream].number for step in range(end)]
        assert not any(world.steps[row + step][stream].last for step in range(end - 1))


@pytest.mark.parametrize(
    ("rows", "streams", "fit"), [(80, 6, 120), (240, 2, 120), (60, 8, 120), (40, 6, 60), (25, 8, 50)]
)
def test_other_numbers_of_streams_take_over_the_newest_steps_without_gaps(rows, streams, fit):
    """480 steps of 4 streams go into as much memory in another shape, or the newest of them into half as much."""
    world, source, target = World(4, 0, 6, True, drops=False), storage(120, 4), storage(rows, streams)
    world.play(source, 130)
    target.restore(*source.state())
    assert set(everything(target)[1]) == newest(world.steps, fit)
    assert check(target, world.steps)


def store_numbers(store, slot, end):
    return store.gather(store.following(torch.tensor(slot), torch.arange(end)))["number"].tolist()


def lying(change, frames=0, broken=False):
    """A state of a storage that has seen episodes end, but for what `change` does to its tensors and numbers."""
    world, store = World(3, frames, 4, True), storage(8, 3, frames)
    world.play(store, 30)
    if broken:
        world.end(store, fresh=False)
    tensors, numbers = copied(store.state())
    assert len(tensors["last_slots"]) > 2
    change(tensors, numbers)
    return tensors, numbers


def of_numbers(**changed):
    return lambda tensors, numbers: numbers.update(changed)


def of_tensor(name, change):
    return lambda tensors, numbers: tensors.update({name: change(tensors[name])})


def with_first(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


LIES = {
    "more rows than there are": of_numbers(rows=10**6, written=10**6, oldest=0),
    "rows past 64 bits": of_numbers(rows=2**70, written=2**70, oldest=2**70),
    "fewer rows": of_numbers(rows=7),
    "no rows": of_numbers(rows=0),
    "no streams": of_numbers(streams=0),
    "other streams": of_numbers(streams=4),
    "streams of which there are too many": of_numbers(streams=2**62),
    "rows that were never written": of_numbers(oldest=31),
    "rows that were overwritten": of_numbers(oldest=21),
    "fewer steps than none": of_numbers(written=-1),
    "neither broken nor not": of_numbers(broken=2),
    "broken without last observations": of_numbers(broken=1),
    "another number of steps": of_numbers(written=31),
    "nothing written": of_numbers(written=0, oldest=0, broken=1),
    "a row too few": of_tensor("column.number", lambda x: x[:-1]),
    "another shape": of_tensor("observation.position", lambda x: x[..., :1]),
    "another type": of_tensor("valid", lambda x: x.long()),
    "neither true nor false": of_tensor("valid", lambda x: x.view(torch.uint8).mul(3).view(torch.bool)),
    "slots before the first": of_tensor("last_slots", with_first(-1)),
    "slots past the last": of_tensor("last_slots", with_first(27)),
    "slots in another order": of_tensor("last_slots", lambda x: x.flip(0)),
    "slots that are twice there": of_tensor("last_slots", lambda x: torch.cat([x[:1], x[:-1]])),
    "a scalar for slots": of_tensor("last_slots", lambda x: x[0]),
    "too few last observations": of_tensor("last.position", lambda x: x[:-1]),
    "slots of steps that were none": of_tensor("valid", torch.zeros_like),
    "a tensor missing": lambda tensors, numbers: tensors.pop("boundary"),
    "a number missing": lambda tensors, numbers: numbers.pop("streams"),
    "a tensor too many": lambda tensors, numbers: tensors.update(more=torch.zeros(3)),
    "nothing": lambda tensors, numbers: (tensors.clear(), numbers.clear()),
}


@pytest.mark.parametrize("rows", [8, 20])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_states_that_no_storage_gave_are_refused(lie, rows):
    target = storage(rows, 3)
    with pytest.raises(UserError, match="the replay: "):
        target.restore(*lying(lie))
    assert target.written == target.drawable == 0, "and nothing of them is taken over"
    target.restore(*lying(lambda tensors, numbers: None))
    assert target.drawable > 0


STACK_LIES = {
    "stacks deeper than any": of_tensor("age", lambda x: x + 3),
    "stacks that jump": of_tensor("age", lambda x: x.index_fill(0, torch.arange(1, len(x), 2), 1)),
    "no ages": lambda tensors, numbers: tensors.pop("age"),
    "steps whose last observation is lost": of_tensor("valid", torch.ones_like),
}


@pytest.mark.parametrize("lie", STACK_LIES.values(), ids=STACK_LIES)
def test_states_of_stacks_that_no_storage_gave_are_refused(lie):
    with pytest.raises(UserError, match="the replay: "):
        storage(8, 3, 3).restore(*lying(lie, frames=3, broken=True))


def test_a_state_that_speaks_of_more_memory_than_it_has_takes_none():
    world, store = World(3, 0, 4, True), storage(8, 3)
    world.play(store, 5)
    tensors, numbers = copied(store.state())
    target = storage(8, 3)
    target.restore(tensors, numbers | {"rows": 2**50})
    assert check(target, world.steps) == newest(world.steps, 8)


def filled(store, steps, shown, resets):
    """Write steps in which every 50th ends an episode, which starts anew within the step or after another one."""
    streams, at = store.streams, torch.arange(store.streams)
    columns = {name: torch.zeros((streams, *shape), dtype=dtype) for name, (shape, dtype) in store.fields.items()}
    for step in range(steps):
        ended, resetting = ((step - ago + at) % 50 == 0 for ago in (0, 1))
        started = (step - 2 + at) % 50 == 0 if resets else resetting
        valid = ~resetting if resets else torch.ones(streams, dtype=torch.bool)
        store.write(shown, columns, next_observation=shown, valid=valid, started=started | (step == 0), ended=ended)


def test_an_observation_is_kept_once():
    """Of 77 bytes that a transition of 8 numbers took, 32 are the second observation."""
    fields = {"action": ((), torch.int64), "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    seen = {f"{prefix}observation.x": ((8,), torch.float32) for prefix in ("", "next_")}
    before = sum(values.nbytes for values in ReplayBuffer(32_000, fields | seen, CPU).storage.values()) / 32_000
    store = Storage(1000, 32, {"x": part((8,))}, fields, CPU)
    filled(store, 1010, {"x": torch.zeros(32, 8)}, resets=False)
    assert store.drawable == 32_000
    assert before == 32 + 32 + 8 + 4 + 1
    # Six bytes say where a step's next observation stands, whether it was valid, and whether the next follows it.
    assert store.memory / 32_000 <= 32 + 8 + 4 + 1 + 6 + 1.3 < 0.7 * before
    wide = Storage(1000, 32, {"x": part((128,))}, fields, CPU)
    filled(wide, 1010, {"x": torch.zeros(32, 128)}, resets=False)
    assert wide.memory / 32_000 < 0.55 * (2 * 128 * 4 + 13)


def test_frames_take_no_more_memory_than_they_did():
    fields = {"action": ((), torch.int64), "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    shape, steps = (4, 20, 20), 260
    seen = {f"{prefix}observation.x": (shape, torch.uint8) for prefix in ("", "next_")}
    earlier = FrameReplay(2000, {"x": 4}, fields | seen, CPU)
    store = Storage(250, 8, {"x": part(shape, torch.uint8, 4)}, fields, CPU)
    shown = {"x": torch.zeros(8, *shape, dtype=torch.uint8)}
    filled(store, steps, shown, resets=True)
    nothing = {name: torch.zeros((1, 8, *shape), dtype=dtype) for name, (shape, dtype) in (fields | seen).items()}
    earlier.add_step(nothing, torch.ones(1, 8, dtype=torch.bool), torch.ones(1, 8, dtype=torch.bool))
    store.break_streams()
    filled(store, steps, shown, resets=True)
    assert store.memory < sum(values.nbytes for values in earlier._store.values())
