"""Advantages, objectives and running moments against values worked by hand or by an obvious loop."""

import math

import numpy as np
import pytest
import torch

from evorl.algorithms.losses import approximate_kl, clipped_surrogate, clipped_value_error, policy_gradient
from evorl.algorithms.returns import gae
from evorl.replay.moments import Moments
from evorl.replay.scaling import discounted_sums, normalized

T, P, B = 9, 3, 4
GAMMA = torch.tensor([0.9, 0.99, 0.5])
TRACE = torch.tensor([0.95, 1.0, 0.0])


def rollout(seed=0):
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = (torch.randn(T, P, B, generator=generator) for _ in range(3))
    terminated = torch.rand(T, P, B, generator=generator) < 0.15
    truncated = (torch.rand(T, P, B, generator=generator) < 0.15) & ~terminated
    assert terminated.any()
    assert truncated.any()
    return reward, value, next_value, terminated, terminated | truncated


def by_definition(reward, value, next_value, terminated, ended, gamma, trace):
    """The sum of discounted errors up to the end of the episode, for one step after the other."""
    advantage = torch.zeros(T, P, B)
    for t in range(T):
        for p in range(P):
            for b in range(B):
                for k in range(t, T):
                    following = 0.0 if terminated[k, p, b] else next_value[k, p, b]
                    error = reward[k, p, b] + gamma[p] * following - value[k, p, b]
                    advantage[t, p, b] += (gamma[p] * trace[p]) ** (k - t) * error
                    if ended[k, p, b]:
                        break
    return advantage


def test_advantages_are_those_of_the_definition():
    steps = rollout()
    torch.testing.assert_close(gae(*steps, GAMMA, TRACE), by_definition(*steps, GAMMA, TRACE))


def test_without_a_trace_the_advantage_is_the_error_of_one_step():
    reward, value, next_value, terminated, ended = rollout()
    following = torch.where(terminated, 0.0, next_value)
    expected = reward + GAMMA[:, None] * following - value
    torch.testing.assert_close(gae(reward, value, next_value, terminated, ended, GAMMA, torch.zeros(P)), expected)


def test_with_a_full_trace_it_is_the_discounted_return_minus_the_value():
    reward, value = torch.ones(3, 1, 1), torch.full((3, 1, 1), 0.25)
    never = torch.zeros(3, 1, 1, dtype=torch.bool)
    following = torch.cat([value[1:], torch.full((1, 1, 1), 8.0)])
    advantage = gae(reward, value, following, never, never, torch.tensor([0.5]), torch.ones(1))
    returns = [1 + 0.5 + 0.25 + 0.125 * 8, 1 + 0.5 + 0.25 * 8, 1 + 0.5 * 8]
    torch.testing.assert_close(advantage.flatten(), torch.tensor(returns) - 0.25)


def test_discounted_sums_start_anew_with_each_episode_and_go_on_over_calls():
    reward = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)
    ended = torch.tensor([False, True, False, False]).view(4, 1, 1)
    sums, after = discounted_sums(reward, ended, torch.tensor([0.5]), torch.tensor([[6.0]]))
    assert sums.flatten().tolist() == [4.0, 4.0, 4.0, 10.0]
    assert after.tolist() == [[10.0]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (1.5, 2.0, -1.2 * 2.0, False),
        (0.5, 2.0, -0.5 * 2.0, True),
        (1.5, -2.0, 1.5 * 2.0, True),
        (0.5, -2.0, 0.8 * 2.0, False),
        (1.1, 2.0, -1.1 * 2.0, True),
    ],
)
def test_the_surrogate_stops_where_the_ratio_has_gone_far_enough(ratio, advantage, expected, moves):
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    objective = clipped_surrogate(log_ratio, torch.tensor([[advantage]]), torch.tensor([0.2]))
    assert objective.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(objective.sum(), log_ratio)
    assert (gradient.abs().item() > 0) == moves


def test_each_agent_has_its_own_clip():
    objective = clipped_surrogate(torch.full((2, 1), math.log(1.5)), torch.ones(2, 1), torch.tensor([0.1, 0.4]))
    torch.testing.assert_close(objective, torch.tensor([[-1.1], [-1.4]]))


def test_value_clipping_takes_the_larger_error():
    value, old, target = torch.tensor([[2.0, 0.5, -1.0]]), torch.zeros(1, 3), torch.tensor([[3.0, 3.0, 3.0]])
    error = clipped_value_error(value, old, target, torch.tensor([0.5]))
    torch.testing.assert_close(error, torch.tensor([[0.5 * 2.5**2, 0.5 * 2.5**2, 0.5 * 4.0**2]]))


def test_the_divergence_is_never_negative_and_zero_for_equal_policies():
    assert (approximate_kl(torch.randn(2, 50)) >= 0).all()
    assert not approximate_kl(torch.zeros(2, 50)).any()
    half = approximate_kl(torch.tensor([[math.log(0.5)]]))
    assert half.item() == pytest.approx(0.5 - 1 + math.log(2))


def test_the_policy_gradient_weighs_log_probabilities_by_advantages():
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(policy_gradient(log_prob, torch.tensor([[3.0, -5.0]])).sum(), log_prob)
    assert gradient.tolist() == [[-3.0, 5.0]]


def test_normalising_counts_by_weight():
    x, weight = torch.tensor([[1.0, 3.0, 100.0], [5.0, 6.0, 7.0]]), torch.tensor([[0.5, 0.5, 0.0], [1 / 3] * 3])
    result = normalized(x, weight)
    torch.testing.assert_close(result[0, :2], torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(result[1], (x[1] - 6) / math.sqrt(2 / 3))


def test_moments_merge_to_those_of_all_samples_at_once():
    rng = np.random.default_rng(0)
    samples, weight = rng.normal(3, 2, (P, 40, 5)), (rng.random((P, 40)) < 0.7).astype(float)
    merged = Moments(np.zeros(P), np.zeros((P, 5)), np.zeros((P, 5)))
    for part in (slice(0, 1), slice(1, 17), slice(17, 40)):
        merged = merged.merged(Moments.of(samples[:, part], weight[:, part]))
    for p in range(P):
        counted = samples[p, weight[p] > 0]
        assert merged.number[p] == len(counted)
        np.testing.assert_allclose(merged.mean[p], counted.mean(0))
        np.testing.assert_allclose(merged.variance[p], counted.var(0))
    again = Moments.unpacked(merged.packed())
    assert all((a == b).all() for a, b in zip(again, merged, strict=True))
    assert (merged.part(slice(1, 2)).mean == merged.mean[1:2]).all()
