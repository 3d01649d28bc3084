"""Rollouts of small worlds: statistics of rewards and observations, over ranks, rollouts and generations."""

import numpy as np
import pytest
import torch
from helpers.ranks import Exchange
from helpers.support import fields_of
from helpers.worlds import GAMMA, E, Group, P, T, World, check, flat, members, play, played, rollout_experience

from evorl.replay.statistics import RolloutStatistics
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import AgentState


def played_on_two_ranks(worlds, groups, **settings):
    """The batches of each rollout of each rank."""
    exchange = Exchange(2)

    def work(rank):
        experience = rollout_experience(gather=exchange.gather(rank), rank=rank, **settings)
        experience.begin(groups[rank], 1)
        batches = play(experience, worlds[rank])
        experience.end(groups[rank].agents)
        return batches

    return exchange.run(work)


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
    bound = clip or np.inf
    everything = played_on_two_ranks(worlds, groups, normalize_rewards=True, reward_clip=clip)
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


@pytest.mark.parametrize("resumed", [False, True])
def test_sums_of_rewards_go_on_over_generations_with_their_episodes(resumed):
    """A generation that ends in the middle of an episode changes nothing, nor does another process that goes on."""
    world, group = World(seed=3, ends=0.1), Group(members())
    experience = rollout_experience(normalize_rewards=True)
    for generation in range(2):
        if generation and resumed:
            state, experience = experience.state_dict(), rollout_experience(normalize_rewards=True)
            experience.load_state_dict(state)
        experience.begin(group, generation)
        play(experience, world, first=generation * T, last=(generation + 1) * T)
        experience.end(group.agents)
    for p, agent in enumerate(group.agents):
        sums = running_sums(world, p, 2 * T)
        assert agent.state.rewards.variance == pytest.approx(np.var(sums), rel=1e-5)


def test_statistics_of_rewards_go_on_with_the_agent_and_sums_begin_anew_with_their_episodes():
    world, agents = World(seed=3, ends=0.1), members()
    experience = rollout_experience(normalize_rewards=True)
    for generation in range(2):  # The world begins anew, with new episodes.
        experience.begin(Group(agents), generation)
        (batches,) = play(experience, world, last=T)
        experience.end(agents)
    sums = [running_sums(world, p, T) for p in range(P)]
    assert [agent.state.rewards.count for agent in agents] == [2 * T * E] * P
    check(world, batches, lambda t, p, e: world.reward(t, p, e) / np.std(sums[p] * 2))


def test_rollouts_of_a_single_step_have_the_sums_of_longer_ones():
    generator = torch.Generator().manual_seed(0)
    rewards, ended = torch.randn(6, P, E, generator=generator), torch.rand(6, P, E, generator=generator) < 0.3
    found = []
    for length in (6, 1):
        statistics, agents = RolloutStatistics(lambda numbers: numbers[None], Stopwatch()), members()
        statistics.begin(agents)
        for reward, end in zip(rewards.split(length), ended.split(length), strict=True):
            statistics.scaled(reward, end, torch.ones_like(end), torch.tensor(GAMMA))
        statistics.end(agents)
        found.append([list(vars(agent.state.rewards).values()) for agent in agents])
    assert found[0][0][0] == 6 * E
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_agents_keep_no_statistics_of_rewards_that_stay_as_they_are():
    experience, group = rollout_experience(), Group(members())
    experience.begin(group, 1)
    play(experience, World())
    experience.end(group.agents)
    assert [agent.state for agent in group.agents] == [AgentState()] * P


def test_rewards_that_never_vary_stay_finite():
    world = World(ends=0.0)
    for transition, _ in world.steps:
        transition.reward.zero_()
    for batches in played(world, normalize_rewards=True):
        check(world, batches)


def test_reset_steps_are_left_out_of_the_spread_of_rewards():
    world = World(seed=4, next_step=True)
    for transition, _ in world.steps:
        transition.reward.masked_fill_(~transition.valid, 0.0)
    first, second = played(world, normalize_rewards=True)
    for batches, until in ((first, T), (second, 2 * T)):
        spread = [np.std(running_sums(world, p, until)) for p in range(P)]
        check(world, batches, lambda t, p, e, spread=spread: world.reward(t, p, e) / spread[p])


def test_a_reward_that_nothing_compares_with_is_cut():
    """Where every sum has been the same, dividing by its spread makes 1 to 10,000."""
    world = World(ends=0.0)
    for transition, _ in world.steps:
        transition.reward.fill_(1.0)
    (batch,), _ = played(world, members(gamma=0.0), normalize_rewards=True)
    assert fields_of(batch)["return"].abs().max() <= 10.0


def test_observation_statistics_are_of_what_happened_on_all_ranks_and_come_after_each_rollouts_last_batch():
    worlds = [World(1, wide=True, next_step=True), World(2, wide=True, next_step=True, ends=0.6)]
    groups = [Group(members(epochs=2, batch_size=8.0)) for _ in worlds]
    everything = played_on_two_ranks(worlds, groups, normalized=("observation", "picture"))
    assert [[len(batches) for batches in rollouts] for rollouts in everything] == [[4, 4], [4, 4]]
    for index in range(2):
        places = [sorted(world.valid(index * T, (index + 1) * T)) for world in worlds]
        assert len(places[0]) != len(places[1])
        for name, largest in (("observation", 1.0), ("picture", 255.0)):  # Bytes are read as 0 to 1.
            told = [dict(group.events[2 * index : 2 * index + 2])[name] for group in groups]
            for p in range(P):
                seen = np.stack(
                    [
                        world.steps[t][0].observation[name][p, e].double().flatten().numpy() / largest
                        for world, happened in zip(worlds, places, strict=True)
                        for t, agent, e in happened
                        if agent == p
                    ]
                )
                for moments in told:
                    assert moments.number[p] == len(seen)
                    np.testing.assert_allclose(moments.mean[p], seen.mean(0), atol=1e-7)
                    np.testing.assert_allclose(moments.variance[p], seen.var(0), atol=1e-7)
    transitions = [sum(agent == p for world in worlds for _, agent, _ in world.valid(0, 2 * T)) for p in range(P)]
    assert [group.steps.tolist() for group in groups] == [transitions] * 2, "what both ranks made, and no resets"
    assert [len(group.events) for group in groups] == [4, 4]


def test_observation_statistics_stay_as_they_are_while_batches_are_still_due():
    world, group = World(), Group(members(epochs=2, batch_size=(8.0, 16.0, 4.0)))
    experience = rollout_experience(normalized=("observation",))
    experience.begin(group, 1)
    for step in world.steps[: T - 1]:
        experience.add(*step)
        assert next(experience.take_batches(), None) is None
    experience.add(*world.steps[T - 1])
    assert [group.events.copy() for _ in experience.take_batches()] == [[]] * 8
    assert [part for part, _ in group.events] == ["observation"]
    assert list(experience.take_batches()) == [], "a rollout is due once"
    assert len(group.events) == 1


@pytest.mark.parametrize("shape", [(), (1,), (3, 1)])
def test_vectors_of_every_shape_have_statistics(shape):
    world, group = World(), Group(members())
    for transition, _ in world.steps:
        transition.observation["observation"] = transition.observation["observation"][..., 0].view(
            P, E, *(1 for _ in shape)
        ).expand(P, E, *shape)  # fmt: skip
    experience = rollout_experience(normalized=("observation",))
    experience.begin(group, 1)
    play(experience, world, last=T)
    np.testing.assert_allclose(group.events[0][1].mean, np.full((P, max((1, *shape))), (T - 1) / 2))
