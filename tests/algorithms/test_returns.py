"""Returns, losses and running moments where agents differ, episodes end and some samples do not count."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from evorl.algorithms.losses import approximate_kl, clipped_surrogate, clipped_value_error, policy_gradient
from evorl.algorithms.returns import gae
from evorl.replay.moments import Moments
from evorl.replay.scaling import discounted_sums, normalized

T, P, B = 10, 3, 4
GAMMA = torch.tensor([0.9, 0.99, 0.5], dtype=torch.float64)
TRACE = torch.tensor([0.95, 0.4, 0.7], dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rollout(seed):
    reward, value, next_value = random(3, T, P, B, seed=seed)
    chance = torch.rand(T, P, B, generator=torch.Generator().manual_seed(seed))
    terminated, ended = chance < 0.15, chance < 0.3
    assert terminated.any()
    assert (ended & ~terminated).any()
    next_value[:-1] = torch.where(ended[:-1], next_value[:-1], value[1:])
    return reward, value, next_value, terminated, ended


def n_step_returns(reward, next_value, terminated, ended, gamma):
    """For one step of one environment the returns that bootstrap after 1, 2, ... steps of its episode."""
    returns, total = [], 0.0
    for k in range(len(reward)):
        total += gamma**k * float(reward[k])
        returns.append(total + (0.0 if terminated[k] else gamma ** (k + 1) * float(next_value[k])))
        if ended[k]:
            break
    return returns


def each_return(reward, next_value, terminated, ended):
    for t, p, b in np.ndindex(T, P, B):
        later = (values[t:, p, b] for values in (reward, next_value, terminated, ended))
        yield (t, p, b), n_step_returns(*later, float(GAMMA[p]))


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_the_mixture_of_all_n_step_returns_minus_the_value(seed):
    reward, value, next_value, terminated, ended = rollout(seed)
    expected = torch.zeros(T, P, B, dtype=torch.float64)
    for place, returns in each_return(reward, next_value, terminated, ended):
        trace = float(TRACE[place[1]])
        shares = [(1 - trace) * trace**n for n in range(len(returns) - 1)]
        shares.append(1 - sum(shares))
        expected[place] = sum(share * each for share, each in zip(shares, returns, strict=True)) - value[place]
    torch.testing.assert_close(gae(reward, value, next_value, terminated, ended, GAMMA, TRACE), expected)


@pytest.mark.parametrize(("trace", "last"), [(1.0, -1), (0.0, 0)])
def test_the_ends_of_the_mixture_are_the_whole_return_and_that_of_one_step(trace, last):
    reward, value, next_value, terminated, ended = rollout(seed=3)
    expected = torch.zeros(T, P, B, dtype=torch.float64)
    for place, returns in each_return(reward, next_value, terminated, ended):
        expected[place] = returns[last] - value[place]
    traces = torch.full((P,), trace, dtype=torch.float64)
    torch.testing.assert_close(gae(reward, value, next_value, terminated, ended, GAMMA, traces), expected)


def test_nothing_flows_back_over_the_end_of_an_episode():
    reward, value, next_value, terminated, ended = rollout(seed=4)
    ended[5] = True
    first = gae(reward, value, next_value, terminated, ended, GAMMA, TRACE)
    reward[6:], value[6:], next_value[6:] = 100.0, -100.0, 100.0
    other = gae(reward, value, next_value, terminated, ended, GAMMA, TRACE)
    assert torch.equal(first[:6], other[:6])
    assert not torch.equal(first[6:], other[6:])


def test_where_an_episode_terminated_the_next_value_does_not_matter():
    reward, value, next_value, terminated, ended = rollout(seed=5)
    first = gae(reward, value, next_value, terminated, ended, GAMMA, TRACE)
    assert torch.equal(
        gae(reward, value, next_value.masked_fill(terminated, torch.nan), terminated, ended, GAMMA, TRACE), first
    )
    truncated = ended & ~terminated
    moved = gae(reward, value, next_value + truncated, terminated, ended, GAMMA, TRACE) - first
    torch.testing.assert_close(moved[truncated], GAMMA[:, None].expand(T, P, B)[truncated])


def test_discounted_sums_are_those_of_each_agents_discount_and_episode():
    reward, _, _, _, ended = rollout(seed=6)
    before = random(P, B, seed=7)
    sums, after = discounted_sums(reward, ended, GAMMA, before)
    for t, p, b in np.ndindex(T, P, B):
        start = max((k + 1 for k in range(t) if ended[k, p, b]), default=0)
        expected = sum(float(GAMMA[p]) ** (t - k) * float(reward[k, p, b]) for k in range(start, t + 1))
        if start == 0:
            expected += float(GAMMA[p]) ** (t + 1) * float(before[p, b])
        assert float(sums[t, p, b]) == pytest.approx(expected)
    torch.testing.assert_close(after, torch.where(ended[-1], 0.0, sums[-1]))


@pytest.mark.parametrize("cut", [1, 4, T - 1])
def test_discounted_sums_in_two_parts_are_those_of_the_whole(cut):
    reward, _, _, _, ended = rollout(seed=8)
    whole, after = discounted_sums(reward, ended, GAMMA, torch.zeros(P, B))
    first, between = discounted_sums(reward[:cut], ended[:cut], GAMMA, torch.zeros(P, B))
    second, last = discounted_sums(reward[cut:], ended[cut:], GAMMA, between)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(last, after)


@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_the_surrogate_moves_the_ratio_unless_it_has_gone_far_enough_the_right_way(advantage):
    """The first agent's ratio may come to 0.9 or 1.1, the second's to 0.5 or 1.5."""
    ratio = torch.tensor([0.2, 0.7, 0.95, 1.0, 1.05, 1.3, 2.0], dtype=torch.float64).expand(2, 7)
    clip = torch.tensor([0.1, 0.5], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    objective = clipped_surrogate(log_ratio, torch.full_like(ratio, advantage), clip)
    (gradient,) = torch.autograd.grad(objective.sum(), log_ratio)
    for p, b in np.ndindex(2, 7):
        now, edge = float(ratio[p, b]), 1 + math.copysign(float(clip[p]), advantage)
        enough = now > edge if advantage > 0 else now < edge
        assert objective[p, b].item() == pytest.approx(-advantage * (edge if enough else now))
        assert gradient[p, b].item() == pytest.approx(0.0 if enough else -advantage * now)


@pytest.mark.parametrize(
    ("value", "old", "target", "expected", "slope"),
    [
        (5.25, 5.0, 8.0, 0.5 * 2.75**2, -2.75),
        (7.0, 5.0, 8.0, 0.5 * 2.5**2, 0.0),
        (3.0, 5.0, 2.0, 0.5 * 2.5**2, 0.0),
        (2.0, 5.0, 8.0, 0.5 * 6.0**2, -6.0),
        (9.0, 5.0, 2.0, 0.5 * 7.0**2, 7.0),
    ],
)
def test_a_value_stops_when_it_has_moved_far_enough_towards_its_target(value, old, target, expected, slope):
    now, before, goal = (torch.tensor([[number]]) for number in (value, old, target))
    now.requires_grad_()
    error = clipped_value_error(now, before, goal, torch.tensor([0.5]))
    (gradient,) = torch.autograd.grad(error.sum(), now)
    assert (error.item(), gradient.item()) == pytest.approx((expected, slope))


def test_each_agents_values_have_its_own_bound():
    error = clipped_value_error(
        torch.full((2, 1), 4.0), torch.zeros(2, 1), torch.full((2, 1), 5.0), torch.tensor([1.0, 3.0])
    )
    torch.testing.assert_close(error, torch.tensor([[0.5 * 4.0**2], [0.5 * 2.0**2]]))


def test_the_divergence_is_on_average_the_true_one():
    old, new = random(2, 6, seed=9).log_softmax(-1)
    true = (old.exp() * (old - new)).sum()
    torch.testing.assert_close((old.exp() * approximate_kl(new - old)).sum(), true)


@pytest.mark.parametrize("log_ratio", [1e-4, -1e-4, 1e-3])
def test_small_divergences_are_not_lost_in_rounding(log_ratio):
    found = approximate_kl(torch.tensor([[log_ratio]], dtype=torch.float32))
    assert found.item() == pytest.approx(log_ratio**2 / 2, rel=1e-2)


def test_the_expected_policy_gradient_is_that_of_the_expected_advantage():
    logits, advantage = random(2, 5, seed=10).requires_grad_(), random(2, 5, seed=11)
    logs = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logs.exp() * advantage).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((logs.detach().exp() * policy_gradient(logs, advantage)).sum(), logits)
    torch.testing.assert_close(found, -expected)


def test_what_weighs_nothing_does_not_move_the_normal_values():
    x, weight = random(P, 6, seed=12), torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25, 0.0], dtype=torch.float64)
    counted = weight > 0
    result = normalized(x, weight.expand(P, 6))[:, counted]
    mean, scale = x[:, counted].mean(-1, keepdim=True), x[:, counted].std(-1, keepdim=True, unbiased=False)
    torch.testing.assert_close(result, (x[:, counted] - mean) / scale)
    x[:, ~counted] = 1e6
    torch.testing.assert_close(normalized(x, weight.expand(P, 6))[:, counted], result)


def test_unequal_weights_count_like_repeated_samples():
    x = random(1, 3, seed=13)
    weighted = normalized(x, torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64))
    repeated = normalized(x[:, [0, 0, 1, 2]], torch.full((1, 4), 0.25, dtype=torch.float64))
    torch.testing.assert_close(weighted, repeated[:, 1:])


def test_equal_values_are_normal_at_zero():
    assert not normalized(torch.full((2, 4), 8.0), torch.full((2, 4), 0.25)).any()


def test_an_agent_without_samples_that_count_stays_finite():
    assert normalized(random(1, 4, seed=14), torch.zeros(1, 4, dtype=torch.float64)).isfinite().all()


def samples(seed=0, offset=0.0, number=30):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(P, number, 2)) + offset, (rng.random((P, number)) < 0.6).astype(float)


def nothing():
    return Moments(np.zeros(P), np.zeros((P, 2)), np.zeros((P, 2)))


def close(one, other):
    for mine, yours in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, yours, atol=1e-12)


def test_moments_are_those_of_the_samples_that_count():
    values, weight = samples()
    moments = Moments.of(values, weight)
    values[weight == 0] = 1e9
    close(Moments.of(values, weight), moments)
    for p in range(P):
        counted = values[p, weight[p] > 0]
        close(moments.part(slice(p, p + 1)), ([len(counted)], [counted.mean(0)], [counted.var(0)]))


@pytest.mark.parametrize("sizes", [(30,), (1, 29), (7, 11, 12), (0, 15, 0, 15)])
def test_moments_of_parts_merge_in_any_order(sizes):
    values, weight = samples()
    edges = np.cumsum([0, *sizes])
    parts = [slice(*pair) for pair in pairwise(edges)]
    whole = Moments.of(values, weight)
    for order in (parts, parts[::-1]):
        merged = nothing()
        for part in order:
            merged = merged.merged(Moments.of(values[:, part], weight[:, part]))
        close(merged, whole)


def test_an_agent_that_has_seen_nothing_adds_nothing():
    values, weight = samples()
    weight[1] = 0
    moments = Moments.of(values, weight)
    assert (moments.number[1], *moments.mean[1], *moments.variance[1]) == (0, 0, 0, 0, 0)
    with np.errstate(all="raise"):
        close(moments.merged(nothing()), moments)
        close(nothing().merged(moments), moments)
        close(nothing().merged(nothing()), nothing())


def test_merging_keeps_small_variances_of_large_values():
    values, _ = samples(offset=1e7, number=1000)
    everything, merged = np.ones(values.shape[:2]), nothing()
    for start in range(0, 1000, 10):
        part = slice(start, start + 10)
        merged = merged.merged(Moments.of(values[:, part], everything[:, part]))
    np.testing.assert_allclose(merged.variance, values.var(1), rtol=1e-6)


def test_moments_travel_as_one_array_for_each_agent():
    moments = Moments.of(*samples())
    packed = moments.packed()
    assert packed.shape == (P, 1 + 2 + 2)
    close(Moments.unpacked(packed), moments)
    close(Moments.unpacked(packed[1:]), moments.part(slice(1, None)))
