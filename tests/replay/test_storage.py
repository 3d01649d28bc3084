"""One storage for replay and rollouts: what is drawn is what happened, against lists that keep everything."""

import numpy as np
import pytest
import torch
from helpers.lanes import COLUMNS, CPU, HISTORIES, World, check, check_ends, everything, newest, part, storage
from hypothesis import given, settings

from evorl.replay.storage import Storage, link_type, memory_at_first


@given(**HISTORIES)
@settings(max_examples=120, deadline=None)
def test_what_is_drawn_is_what_happened(seed, lanes, rows, frames, resets_in_step, plan):
    world = World(lanes, frames, seed, resets_in_step)
    store = storage(rows, lanes, frames)
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
        where |= dict(zip(slots, (one.number for one in world.steps[-1]), strict=True))
        drawn, _ = everything(store)
        numbers = store.gather(drawn).columns["number"].tolist()
        assert [where[slot] for slot in drawn.tolist()] == numbers == sorted(numbers)
        if step % 9 == 8:
            world.end(store, fresh=step % 2 == 0)


@pytest.mark.parametrize("rounds", [0, 1, 16])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 1.0])
def test_all_valid_index_are_equally_likely_however_many_are_invalid(share, rounds, monkeypatch):
    """With fewer rounds of rejection the list of valid slots decides more of the draws, all of them without any."""
    monkeypatch.setattr("evorl.replay.storage.ROUNDS", rounds)
    random, store, valid = np.random.default_rng(0), storage(9, 4), []
    shown, never = {"position": torch.zeros(4, 2)}, torch.zeros(4, dtype=torch.bool)
    for _ in range(50):
        own = random.random(4) < share
        columns = {"number": torch.zeros(4).long(), "terminated": never}
        flags = {"started": never, "ended": never}
        store.write(shown, columns, next_observation=shown, valid=torch.from_numpy(own), **flags)
        valid.append((store.newest_row * 4 + np.flatnonzero(own)).tolist())
        expected = [slot for row in valid[-9:] for slot in row]
        assert store.drawable == len(expected)
        assert store.valid_index().tolist() == expected
        one, again = (store.draw((3, 2, 5), torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(one, again)
        assert not expected or set(one.flatten().tolist()) <= set(expected)
    counts = torch.bincount(store.draw((40, 500), torch.Generator().manual_seed(2)).flatten(), minlength=store.size)
    counts = counts[expected] if expected else torch.zeros(1)
    mean = 20_000 / max(1, len(expected))
    # Chi-square with at most 35 degrees of freedom exceeds 77 once in 20,000 times.
    assert not expected or ((counts - mean) ** 2 / mean).sum() < 77


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


def test_an_episode_that_starts_cuts_what_came_before_although_no_end_was_told():
    world, store = World(2, 0, 3, True, drops=False), storage(6, 2)
    world.play(store, 2, calm=True)
    world.reset()
    world.play(store, 1, calm=True)
    check(store, world.steps)
    assert store.window_end(torch.arange(6), 3).tolist() == [2, 2, 1, 1, 1, 1]


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
    assert store.gather(torch.tensor(4)).columns["number"] == -5, "no copy"
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
        assert found.columns["number"].tolist() == [[step.number for step in row] for row in rows]
        for name in store.parts:
            wanted = [[step.before[name] for step in row] for row in rows]
            assert found.observation[name].tolist() == wanted
        assert ("position" in found.next_observation) == store_next
        assert store.window(store.newest_row - 5, 6)["number"].tolist() == found.columns["number"].tolist()


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
        slots = store.draw((2, 5), None)
        assert store.gather(slots).next_observation["position"].shape == (2, 5, 2)
        assert store.window_end(slots, 3).shape == (2, 5)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        store.gather(slots).columns["number"].tolist()


def filled(store, steps, shown, resets):
    """Write steps in which every 50th ends an episode, which starts anew within the step or after another one."""
    lanes, at = store.lanes, torch.arange(store.lanes)
    columns = {name: torch.zeros((lanes, *shape), dtype=dtype) for name, (shape, dtype) in store.fields.items()}
    for step in range(steps):
        ended, resetting = ((step - ago + at) % 50 == 0 for ago in (0, 1))
        started = (step - 2 + at) % 50 == 0 if resets else resetting
        valid = ~resetting if resets else torch.ones(lanes, dtype=torch.bool)
        store.write(shown, columns, next_observation=shown, valid=valid, started=started | (step == 0), ended=ended)


def test_an_observation_is_kept_once():
    """As two observations a transition of 8 numbers takes 77 bytes, of which one observation are 32."""
    fields = {"action": ((), torch.int64), "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    store = Storage(1000, 32, {"x": part((8,))}, fields, CPU)
    filled(store, 1010, {"x": torch.zeros(32, 8)}, resets=False)
    assert store.drawable == 32_000
    # Six bytes say where a step's next observation stands, whether it was valid, and whether the next follows it.
    assert store.memory / 32_000 <= 32 + 8 + 4 + 1 + 6 + 1.3 < 0.7 * (32 + 32 + 8 + 4 + 1)
    wide = Storage(1000, 32, {"x": part((128,))}, fields, CPU)
    filled(wide, 1010, {"x": torch.zeros(32, 128)}, resets=False)
    assert wide.memory / 32_000 < 0.55 * (2 * 128 * 4 + 13)


def test_frames_are_kept_once():
    """With what belongs to the observations before the oldest row, and 21 bytes for each step."""
    fields = {"action": ((), torch.int64), "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    shape, steps = (4, 20, 20), 260
    store = Storage(250, 8, {"x": part(shape, torch.uint8, 4)}, fields, CPU)
    shown = {"x": torch.zeros(8, *shape, dtype=torch.uint8)}
    for _ in range(2):
        store.break_lanes()
        filled(store, steps, shown, resets=True)
    assert store.memory < (250 + 4 + 1) * 8 * (20 * 20 + 21)


def test_only_the_columns_that_are_asked_for_are_gathered_and_flags_too():
    world, store = World(2, 0, 7, True), storage(9, 2)
    slots = world.play(store, 9)
    assert store.gather(slots).columns.keys() == {"number", "terminated"}
    found = store.gather(slots, ("number", "valid")).columns
    assert found.keys() == {"number", "valid"}
    assert found["valid"].tolist() == [[step.valid for step in row] for row in world.steps]


@pytest.mark.parametrize("frames", [0, 1, 3])
@pytest.mark.parametrize(("rows", "lanes"), [(1, 1), (9, 4), (2000, 7)])
def test_how_much_memory_there_must_be_is_known_before_it_is_taken(rows, lanes, frames):
    store = storage(rows, lanes, frames)
    assert memory_at_first(rows, lanes, store.parts, store.fields) == store.memory


def test_links_take_four_bytes_while_these_can_count_all_slots_and_last_observations():
    assert link_type(2**30 - 1) == torch.int32
    assert link_type(2**30) == torch.int64
