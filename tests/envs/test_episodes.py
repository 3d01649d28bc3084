"""Which episodes a training return is the mean of: all that began in a stretch of time, and each its agent's own."""

import numpy as np
import pytest

from evorl.envs.episodes import Collected, Episodes


def popped(episodes):
    """The counters of episodes by name; steps are counted by the environments."""
    return Collected(np.zeros(1), *episodes.pop())


def played(draw, generations, steps, num_envs, owners=None, carries=True):
    """What `pop` gives after each generation [G] of one agent whose episodes `draw` gives as (length, return)."""
    episodes, given = Episodes(1, num_envs), []
    left, age, value = np.zeros(num_envs, dtype=int), np.zeros(num_envs, dtype=int), np.zeros(num_envs)
    for generation in range(generations):
        episodes.hand_over([owners[generation] if owners else 0])
        if not carries:
            episodes.restart()
            left[:] = 0
        for _ in range(steps):
            for copy in np.flatnonzero(left == 0):
                (left[copy], value[copy]), age[copy] = draw(), 0
            left, age = left - 1, age + 1
            episodes.step(np.where(left == 0, value, 0.0), age, left == 0, None)
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
        over = np.array([step == 20, step == 1000])
        episodes.step(np.array([0.0, float(step == 1000)]), np.array([step, step]), over, None)
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


def test_what_waits_to_be_counted_goes_with_its_agent():
    """The episode of three steps waits, as one of five that began with it might still run; its agent is then gone."""
    for owners, later in (([0, 0], 2.0), ([0, 1], 0.0)):
        episodes = Episodes(1, 1)
        episodes.hand_over([owners[0]])
        for length in (5, 3):
            for step in range(length):
                episodes.step(np.ones(1), np.array([step + 1]), np.array([step == length - 1]), None)
        assert popped(episodes).returns == 5.0
        episodes.hand_over([owners[1]])
        for step in range(2):
            episodes.step(np.ones(1), np.array([step + 1]), np.array([False]), None)
        assert popped(episodes).episodes == later / 2


def test_what_ended_before_an_agent_took_over_is_not_its_own():
    """Two agents, one environment each; the second agent is replaced after episodes of 1 step that return 1 and 10."""
    episodes, over = Episodes(2, 1), np.array([True, True])
    episodes.hand_over([0, 1])
    episodes.step(np.array([1.0, 10.0]), np.array([1, 1]), over, None)
    episodes.hand_over([0, 2])
    episodes.step(np.array([2.0, 20.0]), np.array([1, 1]), over, None)
    collected = popped(episodes)
    assert collected.returns.tolist() == [3.0, 20.0]
    assert collected.episodes.tolist() == [2.0, 1.0]
    assert collected.ended.tolist() == [2.0, 2.0]


def test_recent_episodes_are_those_since_the_last_question():
    """Two environments of one agent: episodes of 1 and 2 steps, which return 1 and 4; asking changes nothing."""
    asked, silent = Episodes(1, 2), Episodes(1, 2)
    for step in range(4):
        ended = np.array([True, step % 2 == 1])
        for episodes in (asked, silent):
            episodes.step(np.array([1.0, 2.0]), np.array([1, 1 + step % 2]), ended, None)
        if step == 1:
            assert asked.recent() == (2.0, 4 / 3)
    assert asked.recent() == (2.0, 4 / 3)
    assert asked.recent() is None
    for mine, other in zip(asked.pop(), silent.pop(), strict=True):
        assert (mine == other).all()
