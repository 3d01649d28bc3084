"""Rollouts that actors made are joined to batches, with older ones beside them where that is wanted."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evorl.config import validate
from evorl.envs.spaces import ObservationSpec
from evorl.replay.observations import moments_of
from evorl.replay.received import GradientMemory, ReceivedGradients, ReceivedRollouts, gradient_batch
from evorl.system.stopwatch import Stopwatch

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

    def batch_targets(self, batch):
        return {"advantage": batch.columns["reward"] - 1}

    def acted(self, steps):
        self.steps.append(steps.tolist())

    def update_observation_stats(self, part, moments):
        self.seen.append(float(moments.mean.mean()))


def received(passes, minibatches=1):
    algorithm = {"name": "appo", "rollout_steps": T, "rollouts": 2, "passes": passes, "minibatches": minibatches}
    return ReceivedRollouts(
        validate({"algorithm": algorithm}),
        normalized={"x": ObservationSpec("vector", (1,), torch.float32)},
        rank=0,
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
        for batch in experience.take_batches():
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


class Numbered(Rollout):
    """A rollout whose observations and rewards number the steps of all agents; the second one of agent 0 is a gap."""

    def __init__(self, number, recurrent=False):
        self.values = (number * P * T * E + torch.arange(float(P * T * E))).view(P, T, E)
        self.recurrent = recurrent

    def state(self, step):
        return self.values[:, 0].view(P, E, 1, 1) if self.recurrent else None

    def columns(self, names):
        valid = torch.ones(P, T, E, dtype=torch.bool)
        valid[0, 1, 0] = False
        given = super().columns([name for name in names if name != "started"])
        return given | {"valid": valid} | ({"started": self.values % 2 == 0} if "started" in names else {})


@pytest.mark.parametrize("parts", [4, 5])
def test_each_pass_learns_once_from_every_step_in_shuffled_minibatches(parts):
    """Also where the minibatches cannot be of one size."""
    experience, policy = received(passes=3, minibatches=parts), Policy()
    experience.begin(policy, 1)
    for number in range(2):
        experience.extend(Numbered(number))
    batches = list(experience.take_batches())
    assert len(batches) == 3 * parts
    orders = set()
    for start in range(0, 3 * parts, parts):
        for agent in range(P):
            seen = [batch.columns["reward"][agent][batch.weight[agent] > 0] for batch in batches[start : start + parts]]
            wanted = {float(n) for rollout in range(2) for n in Numbered(rollout).values[agent].flatten()}
            wanted -= {float(Numbered(rollout).values[0, 1, 0]) for rollout in range(2)}
            assert sorted(torch.cat(seen).tolist()) == sorted(wanted)
            orders.add(tuple(torch.cat(seen).tolist()))
    assert len(orders) == 3 * P, "every pass and agent has an order of its own"
    for batch in batches:
        assert torch.equal(batch.observation["x"].squeeze(-1), batch.columns["reward"])
        assert torch.equal(batch.columns["advantage"], batch.columns["reward"] - 1), "targets are of the same steps"
        has_steps = (batch.weight > 0).any(-1)  # Both gaps may come into one part of two steps.
        torch.testing.assert_close(batch.weight.sum(-1), has_steps.float())
        assert batch.all_due
        assert batch.due.tolist() == [1.0] * P


def test_minibatches_of_recurrent_agents_are_whole_rollouts_with_their_states():
    experience, policy = received(passes=1, minibatches=2), Policy()
    experience.begin(policy, 1)
    for number in range(2):
        experience.extend(Numbered(number, recurrent=True))
    batches = list(experience.take_batches())
    assert len(batches) == 2
    firsts = []
    for batch in batches:
        rewards = batch.columns["reward"].unflatten(1, (T, -1))
        assert rewards.shape == (P, T, E)
        assert torch.equal(batch.recurrent.state.view(P, E), rewards[:, 0])
        assert torch.equal(batch.recurrent.started, rewards % 2 == 0)
        assert torch.equal(rewards[:, 1:] - rewards[:, :1], torch.tensor([E, 2.0 * E]).view(1, -1, 1).expand(P, -1, E))
        firsts.append(rewards[:, 0])
    assert torch.cat(firsts, 1).sort(1).values.tolist() == [[0, 1, 12, 13], [6, 7, 18, 19]]


def test_moments_of_averaged_gradients_and_of_all_ranks_are_merged():
    """Two gradients of each of two ranks; the other rank has seen each of this one's observations plus 1."""
    observation, part, seen = torch.randn(2, P, 7, 3), ObservationSpec("vector", (3,), torch.float32), []
    valid = torch.rand(2, P, 7) < 0.7
    valid[:, :, 0] = True

    class Statistics(Policy):
        def update_observation_stats(self, part, moments):
            seen.append(moments)

    def empty(shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def gather(numbers):
        more = np.array([0, 1, 1, 1, 0, 0, 0]) if numbers.ndim == 2 else 0
        return np.stack([numbers, numbers + more])

    experience = ReceivedGradients(T, 2, False, gather=gather, device=torch.device("cpu"), stopwatch=Stopwatch())
    message = GradientMemory({"policy": 4}, ["loss"], {"x": part}, P, empty)
    experience.begin(Statistics(), 1)
    for mine, counted in zip(observation, valid, strict=True):
        batch = gradient_batch({"policy": torch.zeros(4)}, {"loss": torch.zeros(P)})
        message.write(batch, moments_of({"x": part}, {"x": mine}, counted))
        experience.extend(message)
    assert len(list(experience.take_batches())) == 1
    (found,) = seen
    for agent in range(P):
        mine = observation[:, agent][valid[:, agent]].double().numpy()
        everyone = np.concatenate([mine, mine + 1])
        assert found.number[agent] == len(everyone)
        np.testing.assert_allclose(found.mean[agent], everyone.mean(0))
        np.testing.assert_allclose(found.variance[agent], everyone.var(0))
