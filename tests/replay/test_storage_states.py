"""States of storages: restored ones go on alike, other shapes take over what fits, and what none gave is refused."""

import pytest
import torch
from helpers.streams import World, check, everything, expected, newest, storage, write
from helpers.support import fields_of
from hypothesis import given, settings
from hypothesis import strategies as st

from evorl.types import UserError


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
            one, other = (fields_of(store.gather(store.nth(index))) for store in (first, second))
            torch.testing.assert_close(one, other, rtol=0, atol=0)
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
    return store.gather(store.following(torch.tensor(slot), torch.arange(end))).columns["number"].tolist()


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
    "more steps than 64 bits count": of_numbers(written=30 + 9 * 2**57, oldest=22 + 9 * 2**57),
    "last observations of rows that are gone": of_numbers(oldest=29),
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
    "neither broken nor not": of_numbers(broken=3),
    "no ages": lambda tensors, numbers: tensors.pop("age"),
    "steps whose last observation is lost": of_tensor("valid", torch.ones_like),
}


@pytest.mark.parametrize("lie", STACK_LIES.values(), ids=STACK_LIES)
def test_states_of_stacks_that_no_storage_gave_are_refused(lie):
    with pytest.raises(UserError, match="the replay: "):
        storage(8, 3, 3).restore(*lying(lie, frames=3, broken=True))


def test_stacks_that_show_rows_before_the_first_are_refused():
    world, store = World(3, 3, 4, False, drops=False), storage(8, 3, 3)
    world.play(store, 3, calm=True)
    tensors, numbers = copied(store.state())
    assert tensors["age"][:3, 0].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="'age'"):
        storage(8, 3, 3).restore(tensors | {"age": (tensors["age"] + 1).clamp(max=2)}, numbers)


def last_slots_of(change):
    """A state after so few steps that rows are numbered as they lie, but for its slots of last observations."""
    world, store = World(3, 0, 4, True, drops=False), storage(40, 3)
    world.play(store, 30)
    tensors, numbers = copied(store.state())
    slots = tensors["last_slots"]
    assert len(slots) > 2
    assert (slots.diff() > 0).all()
    return tensors | {"last_slots": change(slots)}, numbers


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (lambda slots: slots, True),
        (lambda slots: torch.cat([slots.new_tensor([0]), slots[1:]]), True),
        (lambda slots: torch.cat([slots.new_tensor([-1]), slots[1:]]), False),
        (lambda slots: torch.cat([slots[:-1], slots.new_tensor([89])]), False),
        (lambda slots: torch.cat([slots[:-1], slots.new_tensor([90])]), False),
        (lambda slots: torch.cat([slots[1:2], slots[1:]]), False),
        (lambda slots: torch.cat([slots[1:2], slots[:1], slots[2:]]), False),
    ],
    ids=["as it was", "the first", "before the first", "of the newest row", "past the last", "twice", "swapped"],
)
def test_each_slot_of_a_last_observation_is_checked_alone(change, fits):
    target = storage(40, 3)
    if fits:
        target.restore(*last_slots_of(change))
        assert target.drawable
    else:
        with pytest.raises(UserError, match="'last_slots'"):
            target.restore(*last_slots_of(change))


@pytest.mark.parametrize(("oldest", "fits"), [(0, True), (1, False)])
def test_a_last_observation_of_a_row_that_is_gone_is_refused(oldest, fits):
    tensors, numbers = last_slots_of(lambda slots: torch.cat([slots.new_tensor([2]), slots[1:]]))
    if fits:
        storage(40, 3).restore(tensors, numbers | {"oldest": oldest})
    else:
        with pytest.raises(UserError, match="'last_slots'"):
            storage(40, 3).restore(tensors, numbers | {"oldest": oldest})


def test_one_last_observation_of_a_step_that_was_none_is_refused():
    tensors, numbers = last_slots_of(lambda slots: slots)
    valid = tensors["valid"].clone()
    valid.view(-1)[tensors["last_slots"][1]] = False
    with pytest.raises(UserError, match="'last_slots'"):
        storage(40, 3).restore(tensors | {"valid": valid}, numbers)


def test_a_state_that_speaks_of_more_memory_than_it_has_takes_none():
    world, store = World(3, 0, 4, True), storage(8, 3)
    world.play(store, 5)
    tensors, numbers = copied(store.state())
    target = storage(8, 3)
    target.restore(tensors, numbers | {"rows": 2**50})
    assert check(target, world.steps) == newest(world.steps, 8)
