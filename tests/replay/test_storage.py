"""One storage for replay and rollouts: what is drawn is what happened, against lists that keep everything."""

import numpy as np
import psutil
import pytest
import torch
from helpers.lanes import COLUMNS, CPU, HISTORIES, World, check, check_ends, everything, newest, part, storage
from hypothesis import given, settings

from evorl.replay.storage import Storage


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


def test_an_episode_that_starts_cuts_what_came_before_although_no_end_was_told():
    world, store = World(2, 0, 3, True), storage(6, 2)
    world.play(store, 2, calm=True)
    world.reset()
    world.play(store, 1, calm=True)
    check(store, world.steps)
    assert store.window_end(torch.arange(6), 3).tolist() == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("frames", [0, 3])
def test_a_rollout_begins_at_the_first_row_again_after_it_is_cleared(frames):
    world, store = World(2, frames, 3, True), storage(6, 2, frames)
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
    one, both = (store.memory(second_ring=second_ring) / 32_000 for second_ring in (False, True))
    # Three bytes say whether a step was valid, whether the next follows it, and where its next observation stands.
    assert one < 32 + 8 + 4 + 1 + 3 + 0.1
    assert both - one == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize("resets", [True, False])
def test_a_host_gives_memory_only_where_something_is_written(resets):
    """Else the second ring would take what replay.capacity was not checked for."""
    shape, memory = (84, 84, 1), psutil.Process().memory_info
    before = memory().rss
    store = Storage(2_000, 4, {"x": part(shape, torch.uint8)}, COLUMNS, CPU)
    filled(store, 2_000, {"x": torch.ones(4, *shape, dtype=torch.uint8)}, resets=resets)
    assert resets or store.flags["final"].sum() > 150, "the second ring has some all over"
    assert memory().rss - before < 1.3 * store.size * 84 * 84


def test_memory_that_the_system_refuses_is_an_error_of_torch(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("evorl.replay.storage.mmap.mmap", refuse)
    columns = storage(7, 3, 0).columns.values()
    assert not any(column.any() for column in columns), "torch has some, or names the settings that take less"


def test_frames_are_kept_once():
    """With what belongs to the observations before the oldest row, and 21 bytes for each step."""
    fields = {"action": ((), torch.int64), "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    shape, steps = (4, 20, 20), 260
    store = Storage(250, 8, {"x": part(shape, torch.uint8, 4)}, fields, CPU)
    shown = {"x": torch.zeros(8, *shape, dtype=torch.uint8)}
    for _ in range(2):
        store.break_lanes()
        filled(store, steps, shown, resets=True)
    assert store.memory(second_ring=False) < (250 + 4 + 1) * 8 * (20 * 20 + 21)
