"""Sequences for recurrent networks, against episodes followed one step at a time. Axes: T learned steps, D draws."""

import pytest
import torch
from helpers.lanes import HISTORIES, World, storage
from helpers.support import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from evorl.replay.batches import MAX_SHARE, BatchBuilder, SequenceBuilder
from evorl.replay.samplers import Draws
from evorl.types.outcomes import UserError


def batch_at(builder, index, weight=None, share=None):
    """The batch of an update of one agent that draws at `index`."""
    weight = torch.full(index.shape, 1 / len(index)) if weight is None else weight
    draws = Draws(index[None, None], weight[None, None], None if share is None else share[None, None])
    (batch,) = builder.batches(draws, torch.ones(1, 1))
    return batch


def by_hand(steps, row, lane, length, burn_in, held):
    """The steps that are learned from a step on, and those before it, oldest first, of which the ring holds `held`."""
    learned, before = [steps[row][lane]], []
    while len(learned) < length and not learned[-1].last and row + len(learned) < len(steps):
        learned.append(steps[row + len(learned)][lane])
    while len(before) < burn_in and row > len(before):
        earlier = steps[row - len(before) - 1][lane]
        if earlier.last or earlier.number not in held:
            break
        before.append(earlier)
    return learned, before[::-1]


@given(length=st.integers(1, 5), burn_in=st.integers(0, 4), **HISTORIES)
@settings(max_examples=120, deadline=None)
def test_sequences_are_what_happened(seed, lanes, rows, frames, length, burn_in, resets_in_step, plan):
    """In episodes that terminate or are truncated, over breaks of the lanes and ends of the ring."""
    rows = max(rows, length + burn_in)
    world, store = World(lanes, frames, seed, resets_in_step), storage(rows, lanes, frames)
    builder = SequenceBuilder(store, length, burn_in)
    for steps, then in plan:
        world.play(store, steps)
        place = {step.number: (row, at) for row, own in enumerate(world.steps) for at, step in enumerate(own)}
        index = store.valid_index()
        held = set(store.gather(index).columns["number"].tolist())
        batch = batch_at(builder, index) if len(index) else None
        for draw, number in enumerate(store.gather(index).columns["number"].tolist()):
            row, lane = place[number]
            learned, before = by_hand(world.steps, row, lane, length, burn_in, held)
            for time in range(length):
                at = 0, time * len(index) + draw
                assert bool(batch.weight[at] > 0) == (time < len(learned))
                if time < len(learned):
                    step = learned[time]
                    assert int(batch.columns["number"][at]) == step.number
                    assert bool(batch.columns["terminated"][at]) == step.terminated
                    for name in store.parts:
                        assert batch.observation[name][at].tolist() == step.before[name]
                        assert batch.next_observation[name][at].tolist() == step.after[name]
            first = burn_in - len(before)
            assert batch.recurrent.started[0, :, draw].nonzero().flatten().tolist() == [first]
            for time, step in enumerate(before, first):
                for name in store.parts:
                    assert batch.recurrent.burn_in[name][0, time * len(index) + draw].tolist() == step.before[name]
        if then != "go on":
            world.end(store, fresh=then == "anew")


def test_every_learned_step_of_a_batch_counts_the_same_times_the_weight_of_its_draw():
    world, store = World(2, 0, 3, True), storage(20, 2)
    world.play(store, 20)
    index = store.valid_index()
    share = torch.full((len(index),), 1 / len(index))
    batch = batch_at(SequenceBuilder(store, 3, 2), index, share * torch.linspace(0.5, 1, len(index)), share)
    steps = store.window_end(index, 3)
    assert steps.min() < 3 == steps.max()
    assert float(batch.share.sum()) == pytest.approx(1.0)
    each = batch.share[batch.share > 0]
    assert len(each) == int(steps.sum())
    assert float(each.max()) == pytest.approx(float(each.min()))
    weights = batch.weight.unflatten(-1, (3, -1))[0]
    expected = torch.linspace(0.5, 1, len(index)) / steps.sum()
    torch.testing.assert_close(weights[0], expected)
    torch.testing.assert_close(weights[2], torch.where(steps == 3, expected, 0.0))


def test_without_a_draw_an_agents_weights_are_zero():
    world, store = World(1, 0, 3, True), storage(8, 1)
    world.play(store, 8)
    nothing = torch.zeros(2)
    assert not batch_at(SequenceBuilder(store, 2, 1), torch.tensor([0, 1]), nothing).weight.any()


def test_a_sequences_error_is_mixed_from_the_largest_and_the_mean_of_its_learned_steps():
    builder = SequenceBuilder(storage(8, 1), 3, 0)
    # Two draws: (1, -4, 2), and (3, and two steps after the end of its episode).
    errors = torch.tensor([[1.0, 3.0, -4.0, 50.0, 2.0, 60.0]])
    weight = torch.tensor([[0.1, 0.2, 0.1, 0.0, 0.1, 0.0]])
    given_batch = batch_of({"action": torch.zeros(1, 6)}, weight, torch.ones(1))
    expected = [MAX_SHARE * 4 + (1 - MAX_SHARE) * 7 / 3, 3.0]
    assert builder.errors(errors, given_batch)[0].tolist() == pytest.approx(expected)
    assert BatchBuilder(storage(8, 1)).errors(errors, given_batch) is errors


def test_a_sequence_longer_than_the_replay_is_refused():
    with pytest.raises(UserError, match=r"algorithm.sequence_length: sequences of 6 steps after a burn-in of 3 .* 8 "):
        SequenceBuilder(storage(8, 2), 6, 3)
