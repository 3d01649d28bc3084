"""Rollouts that actors made are joined to batches, with older ones beside them where that is wanted."""

from types import SimpleNamespace

import numpy as np
import torch

from evorl.envs.spaces import ObservationSpec
from evorl.replay.received import ReceivedRollouts, ReceivedSettings
from evorl.system.console import Stopwatch

T, P, E = 3, 2, 2


class Rollout:
    """What an actor has sent: its number is its observations and rewards."""

    layout = SimpleNamespace(fields=("reward",))

    def __init__(self, number):
        self.values = torch.full((P, T, E), float(number))

    def state(self, step):
        return None

    def columns(self, names):
        given = dict.fromkeys(("terminated", "truncated"), torch.zeros(P, T, E, dtype=torch.bool))
        given |= {"reward": self.values, "valid": torch.ones(P, T, E, dtype=torch.bool)}
        return {name: given[name] for name in names}

    def observation(self):
        return {"x": self.values.unsqueeze(-1)}

    def ends(self):
        return []


class Policy:
    """What is told of the steps that its agents made, and of what they saw."""

    def __init__(self):
        self.agents = [SimpleNamespace(state=SimpleNamespace(rewards=SimpleNamespace(count=0, mean=0, variance=0)))] * P
        self.steps, self.seen = [], []

    def acted(self, steps):
        self.steps.append(steps.tolist())

    def update_observation_stats(self, part, moments):
        self.seen.append(float(moments.mean.mean()))


def received(**settings):
    return ReceivedRollouts(
        ReceivedSettings(T, rollouts=2, normalized=("x",), **settings),
        {"x": ObservationSpec("vector", (1,), torch.float32)},
        gather=lambda numbers: np.asarray(numbers)[None],
        device=torch.device("cpu"),
        stopwatch=Stopwatch(),
    )


def learned(experience, policy, pairs=40, generation=1):
    """The numbers of the rollouts in each batch of a generation."""
    experience.begin(policy, generation)
    found = []
    for number in range(2 * pairs):
        experience.extend(Rollout(number))
        for batch in experience.batches():
            rewards = batch.columns["reward"].unflatten(1, (T, -1))[0, 0, ::E]
            assert torch.equal(batch.observation["x"].squeeze(-1), batch.columns["reward"])
            torch.testing.assert_close(
                batch.weight, torch.full((P, rewards.numel() * T * E), 1 / (rewards.numel() * T * E))
            )
            found.append([int(each) for each in rewards])
    return found


def test_every_rollout_is_learned_from_in_each_pass():
    policy = Policy()
    assert learned(received(passes=2), policy, pairs=2) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert policy.steps == [[2.0 * T * E] * P] * 2


def test_older_rollouts_come_beside_the_new_ones_and_count_no_second_time():
    policy = Policy()
    batches = learned(received(passes=1, replayed=3, kept=6), policy)
    assert batches[0] == [0, 1], "there is nothing older yet"
    for place, (first, second, *older) in enumerate(batches[1:], start=1):
        assert (first, second) == (2 * place, 2 * place + 1)
        assert len(older) == 3
        assert set(older) <= set(range(max(0, first - 6), first))
    ages = np.concatenate([np.subtract(batch[0], batch[2:]) for batch in batches[4:]])
    assert set(ages) == {1, 2, 3, 4, 5, 6}, "each of those kept is drawn at times"
    assert policy.steps == [[2.0 * T * E] * P] * len(batches)
    np.testing.assert_allclose(policy.seen, [2 * place + 0.5 for place in range(len(batches))])


def test_draws_are_those_of_the_generation_and_nothing_older_is_left():
    experience, policy = received(passes=1, replayed=2, kept=4, seed=5), Policy()
    first, second = learned(experience, policy, generation=1), learned(experience, policy, generation=2)
    assert second[0] == [0, 1], "what other agents did is not learned from"
    assert first != second
    assert learned(experience, policy, generation=1) == first
