"""Rollouts of small worlds against loops that follow each episode by itself: what is learned from, and when."""

import numpy as np
import pytest
import torch
from helpers import worlds
from helpers.support import fields_of
from helpers.worlds import (
    ALL,
    E,
    Group,
    P,
    T,
    World,
    check,
    check_rollouts,
    flat,
    learned,
    members,
    next_state,
    play,
    played,
    rollout_experience,
    value_of,
)

from evorl.replay import rollouts
from evorl.types.batches import PolicyOutput


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
def test_advantages_and_returns_are_those_of_each_episode(next_step, recurrent):
    check_rollouts(World(0, next_step, recurrent))


def test_all_that_is_learned_of_a_step_was_so_at_that_step():
    world = World(wide=True)
    batches = flat(played(world, members(batch_size=(4.0, 16.0, 6.0), epochs=(2, 1, 3))))
    found = learned(batches)
    assert found.keys() == ALL.keys()
    for (t, p, e), times in found.items():
        assert len(times) == (2, 1, 3)[p]
        transition, output = world.steps[t]
        for fields in times:
            assert set(fields) - {"weight", "advantage", "return"} == {
                "observation.observation", "observation.picture", "observation.action_mask", "unclipped_action",
                "log_prob", "value",
            }  # fmt: skip
            for name, values in output.extras.items():
                assert torch.equal(fields[name], values[p, e])
            for name in ("observation", "picture", "action_mask"):
                assert torch.equal(fields[f"observation.{name}"], transition.observation[name][p, e])
    check(world, batches)


def test_targets_are_given_every_hyperparameter(monkeypatch):
    given, targets = {}, worlds.targets
    monkeypatch.setattr(worlds, "targets", lambda segment, numbers: given.update(numbers) or targets(segment, numbers))
    agents = members(epochs=(2, 1, 3))
    played(World(), agents)
    assert given.keys() == agents[0].hyperparameters.keys()
    assert given["epochs"].tolist() == [2, 1, 3]


@pytest.mark.parametrize("next_step", [False, True])
def test_all_steps_of_a_minibatch_that_happened_weigh_the_same(next_step):
    world = World(next_step=next_step)
    for batches in played(world, members(batch_size=(5.0, 16.0, 3.0))):
        for batch in batches:
            for p in range(P):
                positive = batch.weight[p][batch.weight[p] > 0]
                torch.testing.assert_close(positive, torch.full_like(positive, 1 / len(positive)))


def test_a_minibatch_of_nothing_but_resets_weighs_nothing_and_stays_finite():
    world = World(next_step=True)
    for transition, _ in world.steps[:T]:
        transition.valid[1] = False
    batches = played(world, members(batch_size=4.0), normalize_advantage=True)[0]
    assert len(batches) == T * E // 4
    for batch in batches:
        assert not batch.weight[1].any()
        assert all(value.isfinite().all() for value in fields_of(batch).values())
        torch.testing.assert_close(batch.weight[[0, 2]].sum(-1), torch.ones(2))


def test_normal_advantages_keep_returns_as_they_are():
    world = World(next_step=True)
    agents = members(batch_size=(5.0, 16.0, 8.0))
    for batch in flat(played(world, agents, normalize_advantage=True)):
        for p in range(P):
            if not batch.due[p]:
                continue
            counted = (batch.weight[p] > 0).nonzero().flatten().tolist()
            places = [
                tuple(fields_of(batch)["observation.observation"][p, b, [0, 1, 2]].int().tolist()) for b in counted
            ]
            plain = np.array([world.advantage(*place, world.reward) for place in places])
            expected = (plain - plain.mean()) / plain.std()
            np.testing.assert_allclose(fields_of(batch)["advantage"][p, counted], expected, rtol=1e-3, atol=1e-3)
            values = plain + [world.at(*place).value for place in places]
            np.testing.assert_allclose(fields_of(batch)["return"][p, counted], values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("next_step", [False, True])
def test_rewards_are_cut_on_both_sides_before_anything_else(next_step):
    world = World(next_step=next_step)
    for batches in played(world, reward_clip=0.25):
        check(world, batches, lambda *place: min(0.25, max(-0.25, world.reward(*place))))


@pytest.mark.parametrize("length", [2, 4, 8])
def test_sequences_go_on_step_by_step_from_their_recurrent_state(length):
    """Unrolling each sequence gives the values that were seen when it was played."""
    world = World(recurrent=True)
    agents = members(batch_size=(8.0, 16.0, 8.0), epochs=2)
    batches = flat(played(world, agents, sequence=length))
    starts = {}
    for batch in batches:
        sequences = batch.weight.shape[1] // length
        assert batch.recurrent.state.shape == (P, sequences, 1, 1)
        assert batch.recurrent.started.shape == (P, length, sequences)
        rows = {name: fields_of(batch)[name].unflatten(1, (length, sequences)) for name in fields_of(batch)}
        weight = batch.weight.unflatten(1, (length, sequences))
        assert torch.equal(weight > 0, (weight[:, :1] > 0).expand_as(weight)), "a sequence counts as a whole"
        state = batch.recurrent.state
        for k in range(length):
            state = torch.where(batch.recurrent.started[:, k, :, None, None], 0.0, state)
            seen = {"observation": rows["observation.observation"][:, k]}
            torch.testing.assert_close(value_of(seen, state), rows["value"][:, k])
            state = next_state(seen, state)
        for p, s in np.ndindex(P, sequences):
            if not (batch.due[p] and weight[p, 0, s]):
                continue
            t, _, e, _ = rows["observation.observation"][p, 0, s].int().tolist()
            for k in range(length):
                assert rows["observation.observation"][p, k, s, [0, 1, 2]].tolist() == [t + k, p, e]
                assert batch.recurrent.started[p, k, s] == world.steps[t + k][0].started[p, e]
            assert torch.equal(batch.recurrent.state[p, s], world.steps[t][1].state[p, e])
            starts[t, p, e] = starts.get((t, p, e), 0) + 1
    assert starts == {(t, p, e): 2 for t, p, e in ALL if t % length == 0}
    check(world, batches)


def test_recurrent_states_may_grow_between_generations():
    experience = rollout_experience(sequence=2)
    for units in (3, 5, 5):
        experience.begin(Group(members()), 1)
        for transition, output in World(recurrent=True).steps[:T]:
            wide = (each.expand(-1, -1, -1, units) for each in (output.state, output.next_state))
            experience.add(transition, PolicyOutput(output.action, output.extras, *wide))
        (batch,) = experience.take_batches()
        assert batch.recurrent.state.shape == (P, T // 2 * E, 1, units)


def test_agents_that_are_not_recurrent_have_no_state():
    assert all(batch.recurrent is None for batches in played(World()) for batch in batches)


@pytest.mark.parametrize("at_once", [0, 500, 1200, 2**24])
@pytest.mark.parametrize("sequence", [1, 4])
def test_how_many_minibatches_are_gathered_at_once_changes_nothing(at_once, sequence, monkeypatch):
    world, agents = World(recurrent=True), members(batch_size=(4.0, 16.0, 8.0), epochs=(3, 2, 1))
    settings = {"sequence": sequence, "normalize_advantage": True}
    expected = flat(played(world, agents, **settings))
    monkeypatch.setattr(rollouts, "GATHERED_BYTES", at_once)
    found = flat(played(world, agents, **settings))
    assert len(found) == len(expected) == 2 * 12
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(vars(one.recurrent), vars(other.recurrent), rtol=0, atol=0)
        torch.testing.assert_close(fields_of(one), fields_of(other), rtol=0, atol=0)
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.due, other.due)


def order(**options):
    (batch,), _ = played(World(), **options)
    return fields_of(batch)["unclipped_action"].tolist()


def test_the_order_is_that_of_seed_generation_and_rank():
    assert order() == order()
    different = [order(), order(seed=1), order(generation=2), order(rank=1)]
    assert all(one != other for index, one in enumerate(different) for other in different[:index])


def test_a_rollout_that_a_generation_did_not_finish_is_forgotten():
    world, experience = World(), rollout_experience()
    experience.begin(Group(members()), 1)
    assert play(experience, world, 0, T - 1) == []
    experience.begin(Group(members()), 2)
    (batches,) = play(experience, world, T)
    assert set(learned(batches)) == world.valid(T)
