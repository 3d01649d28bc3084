"""Rollouts of small worlds, step by step against loops that follow each episode by itself."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
import torch
from helpers.support import fields_of, output_of
from helpers.worlds import (
    ALL,
    GAMMA,
    PARTS,
    PLAIN,
    E,
    Group,
    P,
    T,
    World,
    check,
    experience,
    flat,
    learned,
    members,
    play,
    played,
    remembered,
    worth,
)

from evorl.envs.spec import as_numbers
from evorl.replay import rollout
from evorl.types import AgentState, UpdateResult


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("memory", [False, True])
def test_advantages_and_returns_are_those_of_each_episode(seed, next_step, memory):
    """The second rollout goes on where the first stopped, in the same rows."""
    world = World(seed, next_step, memory)
    rollouts = played(world)
    assert len(rollouts) == 2
    for index, batches in enumerate(rollouts):
        check(world, batches)
        assert set(learned(batches)) == world.valid(index * T, (index + 1) * T)


def test_all_that_is_learned_of_a_step_was_so_at_that_step():
    world = World(wide=True)
    batches = flat(played(world, members(batch_size=(4.0, 16.0, 6.0), epochs=(2, 1, 3))))
    found = learned(batches)
    assert found.keys() == ALL.keys()
    for (t, p, e), times in found.items():
        assert len(times) == (2, 1, 3)[p]
        transition, decision = world.steps[t]
        for fields in times:
            assert set(fields) - {"weight", "advantage", "return"} == {
                "observation.observation", "observation.picture", "observation.action_mask", "unclipped_action",
                "log_prob", "value",
            }  # fmt: skip
            for name in ("unclipped_action", "log_prob", "value"):
                assert torch.equal(fields[name], decision[name][p, e])
            for name in ("observation", "picture", "action_mask"):
                assert torch.equal(fields[f"observation.{name}"], transition.observation[name][p, e])
    check(world, batches)


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
    batches = played(world, members(batch_size=4.0), replace(PLAIN, normalize_advantage=True))[0]
    assert len(batches) == T * E // 4
    for batch in batches:
        assert not batch.weight[1].any()
        assert all(value.isfinite().all() for value in fields_of(batch).values())
        torch.testing.assert_close(batch.weight[[0, 2]].sum(-1), torch.ones(2))


def test_normal_advantages_keep_returns_as_they_are():
    world = World(next_step=True)
    settings = replace(PLAIN, normalize_advantage=True)
    agents = members(batch_size=(5.0, 16.0, 8.0))
    for batch in flat(played(world, agents, settings)):
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
    for batches in played(world, settings=replace(PLAIN, reward_clip=0.25)):
        check(world, batches, lambda *place: min(0.25, max(-0.25, world.reward(*place))))


@pytest.mark.parametrize("length", [2, 4, 8])
def test_sequences_go_on_step_by_step_from_what_was_remembered(length):
    """Running the memory through each sequence gives the values that were seen when it was played."""
    world = World(memory=True)
    agents = members(batch_size=(8.0, 16.0, 8.0), epochs=2)
    batches = flat(played(world, agents, replace(PLAIN, sequence=length)))
    starts = {}
    for batch in batches:
        sequences = batch.weight.shape[1] // length
        assert batch.recurrent.state.shape == (P, sequences, 1, 1)
        assert batch.recurrent.started.shape == (P, length, sequences)
        rows = {name: fields_of(batch)[name].unflatten(1, (length, sequences)) for name in fields_of(batch)}
        weight = batch.weight.unflatten(1, (length, sequences))
        assert torch.equal(weight > 0, (weight[:, :1] > 0).expand_as(weight)), "a sequence counts as a whole"
        memory = batch.recurrent.state
        for k in range(length):
            memory = torch.where(batch.recurrent.started[:, k, :, None, None], 0.0, memory)
            seen = {"observation": rows["observation.observation"][:, k]}
            torch.testing.assert_close(worth(seen, memory), rows["value"][:, k])
            memory = remembered(seen, memory)
        for p, s in np.ndindex(P, sequences):
            if not (batch.due[p] and weight[p, 0, s]):
                continue
            t, _, e, _ = rows["observation.observation"][p, 0, s].int().tolist()
            for k in range(length):
                assert rows["observation.observation"][p, k, s, [0, 1, 2]].tolist() == [t + k, p, e]
                assert batch.recurrent.started[p, k, s] == world.steps[t + k][0].started[p, e]
            assert torch.equal(batch.recurrent.state[p, s], world.steps[t][1]["memory"][p, e])
            starts[t, p, e] = starts.get((t, p, e), 0) + 1
    assert starts == {(t, p, e): 2 for t, p, e in ALL if t % length == 0}
    check(world, batches)


def test_agents_without_a_memory_recall_nothing():
    assert all(batch.recurrent is None for batches in played(World()) for batch in batches)


@pytest.mark.parametrize("at_once", [0, 500, 1200, 2**24])
@pytest.mark.parametrize("sequence", [1, 4])
def test_how_many_minibatches_are_gathered_at_once_changes_nothing(at_once, sequence, monkeypatch):
    world, agents = World(memory=True), members(batch_size=(4.0, 16.0, 8.0), epochs=(3, 2, 1))
    settings = replace(PLAIN, sequence=sequence, normalize_advantage=True)
    expected = flat(played(world, agents, settings))
    monkeypatch.setattr(rollout, "GATHERED_BYTES", at_once)
    found = flat(played(world, agents, settings))
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
    world, memory = World(), experience()
    memory.begin(Group(members()), 1)
    assert play(memory, world, 0, T - 1) == []
    memory.begin(Group(members()), 2)
    (batches,) = play(memory, world, T)
    assert set(learned(batches)) == world.valid(T)


def drained(memory, stop):
    """What is due of all agents at each update, when `stop` says after which updates an agent stops."""
    due = []
    for batch in memory.batches():
        due.append(batch.due.tolist())
        active = batch.due.clone()
        active[list(stop.get(len(due) - 1, ()))] = 0
        memory.observe(batch, UpdateResult(active))
    return due


def rollouts_with_stops(*stops, **hyperparameters):
    world, group, due = World(), Group(members(**hyperparameters)), []
    memory = experience(replace(PLAIN, normalized=("observation",)))
    memory.begin(group, 1)
    for index, stop in enumerate(stops):
        for transition, decision in world.steps[index * T : (index + 1) * T]:
            memory.add(transition, output_of(decision))
            due += [found] if (found := drained(memory, stop)) else []
    return due, group


def test_an_agent_that_stops_learns_no_more_from_this_rollout_but_from_the_next():
    due, group = rollouts_with_stops({1: [0]}, {0: [1], 2: [2]}, epochs=2, batch_size=8.0)
    assert due == [[[1, 1, 1]] * 2 + [[0, 1, 1]] * 2, [[1, 1, 1]] + [[1, 0, 1]] * 2 + [[1, 0, 0]]]
    assert len(group.events) == 2


@pytest.mark.parametrize(("at_once", "more"), [(0, 0), (2**24, 3)])
def test_when_all_have_stopped_nothing_more_is_due_and_gathered(at_once, more, monkeypatch):
    """What was gathered together with the last batch is still given, and nobody is due."""
    monkeypatch.setattr(rollout, "GATHERED_BYTES", at_once)
    due, group = rollouts_with_stops({0: [0], 2: [1, 2]}, {}, epochs=3, batch_size=8.0)
    assert due[0][:3] == [[1, 1, 1]] + [[0, 1, 1]] * 2
    assert due[0][3:] in ([], [[0, 0, 0]] * more)
    assert due[1] == [[1, 1, 1]] * 6
    assert len(group.events) == 2, "what was seen is absorbed however learning ended"


def test_an_agent_that_is_through_does_not_keep_the_others_from_learning():
    due, _ = rollouts_with_stops({1: [2]}, batch_size=(16.0, 4.0, 4.0))
    assert due == [[[1, 1, 1], [0, 1, 1], [0, 1, 0], [0, 1, 0]]]


def test_nor_do_updates_go_on_for_nobody_once_the_others_have_stopped():
    due, _ = rollouts_with_stops({1: [1, 2]}, batch_size=(16.0, 4.0, 4.0))
    assert due == [[[1, 1, 1], [0, 1, 1]]]


class Together:
    """Two ranks that wait for each other's numbers."""

    def __init__(self):
        self.numbers, self.barrier = [None, None], Barrier(2, timeout=30)

    def gather(self, rank):
        def give(numbers):
            self.numbers[rank] = numbers.copy()
            self.barrier.wait()
            everything = np.stack(self.numbers)
            self.barrier.wait()
            return everything

        return give

    def play(self, worlds, groups, settings, rollouts=2):
        def one(rank):
            memory = experience(settings, gather=self.gather(rank), rank=rank)
            memory.begin(groups[rank], 1)
            batches = play(memory, worlds[rank], last=rollouts * T)
            memory.end(groups[rank].agents)
            return batches

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))


def running_sums(world, agent, last, clip=np.inf):
    """Discounted sums of one agent's rewards in each episode, where a step happened; episodes run on over rollouts."""
    found = []
    for e in range(E):
        total = 0.0
        for t in range(last):
            step = world.at(t, agent, e)
            total = GAMMA[agent] * total + min(clip, max(-clip, step.reward))
            if step.valid:
                found.append(total)
            if step.terminated or step.truncated:
                total = 0.0
    return found


@pytest.mark.parametrize("clip", [None, 0.5])
def test_rewards_are_divided_by_the_spread_of_all_running_sums_on_all_ranks(clip):
    worlds = [World(seed=1), World(seed=2, ends=0.1)]
    groups = [Group(members()) for _ in worlds]
    settings = replace(PLAIN, normalize_rewards=True, reward_clip=clip)
    bound = clip or np.inf
    everything = Together().play(worlds, groups, settings)
    for index in range(2):
        until = (index + 1) * T
        spread = [np.std(flat(running_sums(world, p, until, bound) for world in worlds)) for p in range(P)]
        for world, rollouts in zip(worlds, everything, strict=True):
            check(
                world,
                rollouts[index],
                lambda t, p, e, world=world, spread=spread: min(bound, max(-bound, world.reward(t, p, e))) / spread[p],
            )
    for group in groups:
        for p, agent in enumerate(group.agents):
            sums = flat(running_sums(world, p, 2 * T, bound) for world in worlds)
            assert vars(agent.state.rewards) == pytest.approx(
                {"count": len(sums), "mean": np.mean(sums), "variance": np.var(sums)},
                rel=1e-5,
                abs=1e-6,
            )


def test_statistics_of_rewards_go_on_with_the_agent_and_sums_begin_anew():
    world, agents = World(seed=3, ends=0.1), members()
    settings = replace(PLAIN, normalize_rewards=True)
    for generation in range(2):
        memory = experience(settings)
        memory.begin(Group(agents), generation)
        (batches,) = play(memory, world, last=T)
        memory.end(agents)
    sums = [running_sums(world, p, T) for p in range(P)]
    assert [agent.state.rewards.count for agent in agents] == [2 * T * E] * P
    check(world, batches, lambda t, p, e: world.reward(t, p, e) / np.std(sums[p] * 2))


def test_agents_keep_no_statistics_of_rewards_that_stay_as_they_are():
    memory, group = experience(), Group(members())
    memory.begin(group, 1)
    play(memory, World())
    memory.end(group.agents)
    assert [agent.state for agent in group.agents] == [AgentState()] * P


def test_rewards_that_never_vary_stay_finite():
    world = World(ends=0.0)
    for transition, _ in world.steps:
        transition.reward.zero_()
    for batches in played(world, settings=replace(PLAIN, normalize_rewards=True)):
        check(world, batches)


def test_reset_steps_are_left_out_of_the_spread_of_rewards():
    world = World(seed=4, next_step=True)
    for transition, _ in world.steps:
        transition.reward.masked_fill_(~transition.valid, 0.0)
    first, second = played(world, settings=replace(PLAIN, normalize_rewards=True))
    for batches, until in ((first, T), (second, 2 * T)):
        spread = [np.std(running_sums(world, p, until)) for p in range(P)]
        check(world, batches, lambda t, p, e, spread=spread: world.reward(t, p, e) / spread[p])


def test_what_happened_on_all_ranks_is_absorbed_after_each_rollouts_last_batch():
    worlds = [World(1, wide=True, next_step=True), World(2, wide=True, next_step=True, ends=0.6)]
    groups = [Group(members(epochs=2, batch_size=8.0)) for _ in worlds]
    everything = Together().play(worlds, groups, replace(PLAIN, normalized=("observation", "picture")))
    assert [[len(batches) for batches in rollouts] for rollouts in everything] == [[4, 4], [4, 4]]
    for index in range(2):
        places = [sorted(world.valid(index * T, (index + 1) * T)) for world in worlds]
        assert len(places[0]) != len(places[1])
        for name in ("observation", "picture"):
            told = [dict(group.events[2 * index : 2 * index + 2])[name] for group in groups]
            for p in range(P):
                seen = np.stack(
                    [
                        as_numbers(world.steps[t][0].observation[name][p, e], PARTS[name]).double().flatten().numpy()
                        for world, happened in zip(worlds, places, strict=True)
                        for t, agent, e in happened
                        if agent == p
                    ]
                )
                for moments in told:
                    assert moments.number[p] == len(seen)
                    np.testing.assert_allclose(moments.mean[p], seen.mean(0), atol=1e-9)
                    np.testing.assert_allclose(moments.variance[p], seen.var(0), atol=1e-9)
    transitions = [sum(agent == p for world in worlds for _, agent, _ in world.valid(0, 2 * T)) for p in range(P)]
    assert [group.steps.tolist() for group in groups] == [transitions] * 2, "what both ranks made, and no resets"
    assert [len(group.events) for group in groups] == [4, 4]


def test_nothing_is_absorbed_while_batches_are_still_due():
    world, group = World(), Group(members(epochs=2, batch_size=(8.0, 16.0, 4.0)))
    memory = experience(replace(PLAIN, normalized=("observation",)))
    memory.begin(group, 1)
    for transition, decision in world.steps[: T - 1]:
        memory.add(transition, output_of(decision))
        assert next(memory.batches(), None) is None
    transition, decision = world.steps[T - 1]
    memory.add(transition, output_of(decision))
    assert [group.events.copy() for _ in memory.batches()] == [[]] * 8
    assert [part for part, _ in group.events] == ["observation"]
    assert list(memory.batches()) == [], "a rollout is due once"
    assert len(group.events) == 1
