"""Which episodes a training return is the mean of: all that began in a stretch of time, and each its agent's own."""

import numpy as np
import pytest
import torch

from evorl.envs.episodes import Collected, Episodes


def popped(episodes):
    """The counters of episodes by name; steps are counted by the environments."""
    return Collected(np.zeros(1), *episodes.pop())


def row(*values):
    """Values [E] of the environments of a single agent as a tensor [1, E]."""
    return torch.tensor([values])


def played(draw, generations, steps, num_envs, owners=None, carries=True):
    """What `pop` gives after each generation [G] of one agent whose episodes `draw` gives as (length, return)."""
    episodes, given = Episodes(1, num_envs), []
    left, value = np.zeros(num_envs, dtype=int), np.zeros(num_envs)
    for generation in range(generations):
        episodes.hand_over([owners[generation] if owners else 0])
        if not carries:
            episodes.restart()
            left[:] = 0
        for _ in range(steps):
            for copy in np.flatnonzero(left == 0):
                left[copy], value[copy] = draw()
            left -= 1
            episodes.step(torch.from_numpy(np.where(left == 0, value, 0.0))[None], torch.from_numpy(left == 0)[None])
        given.append(popped(episodes))
    return given


def long_and_good(rng):
    """Episodes of up to 100 steps that return their length, 28.4 on average."""
    length = min(1 + int(rng.exponential(29.0)), 100)
    return length, float(length)


@pytest.mark.parametrize(("steps", "carries"), [(200, False), (64, True)])
def test_long_episodes_count_as_much_as_short_ones(steps, carries):
    """In 200 steps the mean of those that ended is 25.0 and not 28.5: the end of each generation cuts long ones off."""
    rng = np.random.default_rng(0)
    true = np.mean([long_and_good(rng)[1] for _ in range(100_000)])
    given = played(lambda: long_and_good(rng), 150, steps, 8, carries=carries)
    _, sums, counts, ended, lengths = (np.sum(column) for column in zip(*given, strict=True))
    assert sums / counts == pytest.approx(true, rel=0.04)
    assert lengths == sums, "each of these episodes returns its length"
    assert 0.5 * ended < counts <= ended


def test_short_episodes_do_not_count_while_a_long_one_that_began_with_them_is_running():
    """Of two copies that began together, one plays 20 steps for a return of 0, the other 1,000 for a return of 1."""
    episodes = Episodes(1, 2)
    for step in range(1, 1001):
        episodes.step(row(0.0, float(step == 1000)), row(step == 20, step == 1000))
        if step in (300, 999):
            assert popped(episodes).episodes == 0
    collected = popped(episodes)
    assert (collected.returns[0], collected.episodes[0]) == (1.0, 2.0)


def test_every_episode_of_an_agent_that_goes_on_counts_once():
    rng, drawn = np.random.default_rng(0), []

    def draw():
        drawn.append(long_and_good(rng))
        return drawn[-1]

    given = played(draw, 40, 64, 8)
    counts = sum(int(collected.episodes[0]) for collected in given)
    assert len(drawn) - 40 < counts <= sum(collected.ended[0] for collected in given) <= len(drawn)


@pytest.mark.parametrize(
    ("owners", "counts"), [([0, 0, 0, 0], [2, 4, 2, 4]), ([0, 1, 2, 3], [2, 2, 2, 2]), ([0, 0, 1, 1], [2, 4, 2, 4])]
)
def test_an_episode_in_which_the_agent_changed_is_nobodys(owners, counts):
    """Two environments, episodes of four steps and generations of six: every second generation ends within one."""
    given = played(lambda: (4, 1.0), 4, 6, 2, owners)
    assert [int(collected.ended[0]) for collected in given] == [2, 4, 2, 4]
    assert [int(collected.episodes[0]) for collected in given] == counts
    assert [collected.returns[0] for collected in given] == counts


def test_an_episode_of_nobody_does_not_delay_those_of_the_new_agent():
    """One of 101 steps, in which the agent changes; all that the new agent begins take one step."""
    episodes = Episodes(1, 2)
    episodes.hand_over([0])
    for _ in range(100):
        episodes.step(row(1.0, 1.0), row(False, True))
    episodes.hand_over([1])
    for _ in range(10):
        episodes.step(row(1.0, 1.0), row(True, True))
    assert popped(episodes).episodes > 15


def test_what_waits_to_be_counted_goes_with_its_agent():
    """The episode of three steps waits, as one of five that began with it might still run; its agent is then gone."""
    for owners, later in (([0, 0], 2.0), ([0, 1], 0.0)):
        episodes = Episodes(1, 1)
        episodes.hand_over([owners[0]])
        for length in (5, 3):
            for step in range(length):
                episodes.step(row(1.0), row(step == length - 1))
        assert popped(episodes).returns == 5.0
        episodes.hand_over([owners[1]])
        for _ in range(2):
            episodes.step(row(1.0), row(False))
        assert popped(episodes).episodes == later / 2


def test_what_ended_before_an_agent_took_over_is_not_its_own():
    """Two agents, one environment each; the second agent is replaced after episodes of 1 step that return 1 and 10."""
    episodes, over = Episodes(2, 1), torch.tensor([[True], [True]])
    episodes.hand_over([0, 1])
    episodes.step(torch.tensor([[1.0], [10.0]]), over)
    episodes.hand_over([0, 2])
    episodes.step(torch.tensor([[2.0], [20.0]]), over)
    collected = popped(episodes)
    assert collected.returns.tolist() == [3.0, 20.0]
    assert collected.episodes.tolist() == [2.0, 1.0]
    assert collected.ended.tolist() == [2.0, 2.0]


def test_recent_episodes_are_those_since_the_last_question():
    """One agent's episodes of 1 and 2 steps return 1 and 4, another's of 2 steps 20; asking changes nothing."""
    asked, silent = Episodes(2, 2), Episodes(2, 2)
    for step in range(4):
        for episodes in (asked, silent):
            ends = torch.tensor([[True, step % 2 == 1], [step % 2 == 1, False]])
            episodes.step(torch.tensor([[1.0, 2.0], [10.0, 10.0]]), ends)
        if step == 1:
            assert asked.recent() == ((2 + 20) / 2, (4 / 3 + 2) / 2), "each agent weighs the same"
    assert asked.recent() == ((2 + 20) / 2, (4 / 3 + 2) / 2)
    assert asked.recent() is None
    for mine, other in zip(asked.pop(), silent.pop(), strict=True):
        assert (mine == other).all()


def counted_one_by_one(history, owners, resets):
    """Returns, episodes, ended and lengths [4, P] of each generation of a `history` of generations of steps (reward,
    ended), each [P, E], by the definition: every episode is kept with its start, and looked at each time."""
    agents, envs = history[0][0][0].shape
    running = {(agent, env): (0, 0.0, True) for agent in range(agents) for env in range(envs)}
    waiting, longest, clock, given = [], [0] * agents, 0, []
    for generation, steps in enumerate(history):
        if generation:
            changed = [owners[generation][agent] != owners[generation - 1][agent] for agent in range(agents)]
            waiting = [episode for episode in waiting if not changed[episode[0]]]
            longest = [0 if changed[agent] else longest[agent] for agent in range(agents)]
            for (agent, env), (start, total, own) in running.items():
                running[agent, env] = start, total, own and (not changed[agent] or start >= clock)
        ended = [0] * agents
        for rewards, ends in steps:
            clock += 1
            for (agent, env), (start, total, own) in running.items():
                total += rewards[agent, env]
                running[agent, env] = start, total, own
                if ends[agent, env]:
                    ended[agent] += 1
                    if own:
                        waiting.append((agent, start, total, clock - start))
                        longest[agent] = max(longest[agent], clock - start)
                    running[agent, env] = clock + resets, 0.0, True
        for (agent, _), (start, _, own) in running.items():
            longest[agent] = max(longest[agent], clock - start + 1 if own else 0)
        counts = [episode for episode in waiting if episode[1] <= clock - longest[episode[0]]]
        waiting = [episode for episode in waiting if episode not in counts]
        mine = [[episode for episode in counts if episode[0] == agent] for agent in range(agents)]
        sums = [
            [sum(e[2] for e in own), len(own), ended[agent], sum(e[3] for e in own)] for agent, own in enumerate(mine)
        ]
        given.append(np.array(sums, dtype=np.float64).T)
    return given


@pytest.mark.parametrize("resets", [0, 1])
def test_episodes_are_counted_as_one_by_one(resets):
    """With agents that change, and a state that is saved and loaded within steps."""
    rng, shape, owners = np.random.default_rng(0), (2, 3), [[0, 1], [0, 1], [0, 2], [3, 2], [3, 2]]
    history = []
    for length in (170, 300, 41, 257, 400):
        ends = rng.random((length, *shape)) < rng.choice([0.01, 0.2], (length, 1, 1))
        ends[1:] &= ~ends[:-1]  # A step that only resets ends no episode.
        history.append(list(zip(rng.normal(size=(length, *shape)), ends, strict=True)))
    expected = counted_one_by_one(history, owners, resets)
    episodes = Episodes(*shape, resets=resets)
    for steps, theirs, sums in zip(history, owners, expected, strict=True):
        episodes.hand_over(theirs)
        for number, (reward, ended) in enumerate(steps):
            episodes.step(torch.from_numpy(reward), torch.from_numpy(ended))
            if number == 37:
                saved = episodes.state_dict()
                episodes = Episodes(*shape, resets=resets)
                episodes.load_state_dict(saved)
        np.testing.assert_allclose(np.stack(episodes.pop()), sums)
    assert sum(sums[1].sum() for sums in expected) > 100


def test_a_restart_forgets_steps_that_were_not_counted_yet():
    episodes = Episodes(1, 1)
    episodes.step(row(1.0), row(True))
    episodes.restart()
    assert episodes.recent() is None
    assert popped(episodes).ended == 0


@pytest.mark.parametrize("resets", [0, 1])
def test_an_episode_that_begins_as_its_agent_changes_counts_for_the_new_one(resets):
    """Also where a step that only resets the copy comes first."""
    episodes = Episodes(1, 1, resets=resets)
    episodes.hand_over([0])
    episodes.step(torch.ones(1, 1), torch.tensor([[True]]))
    episodes.pop()
    episodes.hand_over([1])
    for ended in (*[False] * resets, False, True, *[False] * 5):
        episodes.step(torch.ones(1, 1), torch.tensor([[ended]]))
    _, count, _, lengths = episodes.pop()
    assert (count.tolist(), lengths.tolist()) == ([1], [2])
