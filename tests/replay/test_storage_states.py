"""States of storages: a restored one goes on like the one that was saved, and any other is refused."""

import pytest
import torch
from helpers.lanes import World, check, storage, write
from helpers.support import fields_of

from evorl.types.outcomes import UserError


def copied(state):
    return {name: value.clone() for name, value in state.items()}


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
    second.load_state_dict(copied(first.state_dict()))
    for _ in range(12):
        assert first.drawable == second.drawable
        drawn = [store.draw((4, 5), torch.Generator().manual_seed(0)) for store in (first, second)]
        assert torch.equal(*drawn)
        if first.drawable:
            one, other = (fields_of(store.gather(drawn[0])) for store in (first, second))
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        again, began = copied(first.state_dict()), copied(second.state_dict())
        assert again.keys() == began.keys()
        assert all(torch.equal(again[name], began[name]) for name in again)
        row, started = world.step()
        assert torch.equal(write(first, row, started), write(second, row, started))
        world.append(row, started)
        check(second, world.steps)


def lying(change):
    """A state of a storage that has seen episodes end, but for what `change` does to its tensors."""
    world, store = World(3, 0, 4, True), storage(8, 3)
    world.play(store, 28)
    tensors = copied(store.state_dict())
    assert len(tensors["last.position"]) > 2
    change(tensors)
    return tensors


def of_tensor(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def of_number(name, number):
    return of_tensor(name, lambda x: torch.tensor(number))


LIES = {
    "another capacity": of_number("rows", 7),
    "other lanes": of_number("lanes", 4),
    "rows that were never written": of_number("oldest", 31),
    "another shape": of_tensor("observation.position", lambda x: x[..., :1]),
    "another type": of_tensor("valid", lambda x: x.long()),
    "too few last observations": of_tensor("last.position", lambda x: x[:-1]),
    "a tensor missing": lambda tensors: tensors.pop("boundary"),
    "a number missing": lambda tensors: tensors.pop("lanes"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_states_that_no_storage_gave_are_refused(lie):
    target = storage(8, 3)
    with pytest.raises(UserError, match="the replay: "):
        target.load_state_dict(lying(lie))
    assert target.written == target.drawable == 0, "and nothing of them is taken over"
    target.load_state_dict(lying(lambda tensors: None))
    assert target.drawable > 0
