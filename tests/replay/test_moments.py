"""Discounted sums, normal advantages and running moments, where some samples do not count."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from evorl.replay.statistics import Moments, discounted_sums, normalized

T, P, B = 10, 3, 4
GAMMA = torch.tensor([0.9, 0.99, 0.5], dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def episodes(seed):
    """Rewards [T, P, B] and where episodes end."""
    ended = torch.rand(T, P, B, generator=torch.Generator().manual_seed(seed)) < 0.3
    return random(T, P, B, seed=seed), ended


def test_discounted_sums_are_those_of_each_agents_discount_and_episode():
    reward, ended = episodes(seed=6)
    before = random(P, B, seed=7)
    sums, after = discounted_sums(reward, ended, GAMMA, before)
    for t, p, b in np.ndindex(T, P, B):
        start = max((k + 1 for k in range(t) if ended[k, p, b]), default=0)
        expected = sum(float(GAMMA[p]) ** (t - k) * float(reward[k, p, b]) for k in range(start, t + 1))
        if start == 0:
            expected += float(GAMMA[p]) ** (t + 1) * float(before[p, b])
        assert float(sums[t, p, b]) == pytest.approx(expected)
    torch.testing.assert_close(after, torch.where(ended[-1], 0.0, sums[-1]))


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


@pytest.mark.parametrize("value", [0.0, 1e-3, 8.1, 1e4])
def test_equal_values_are_normal_at_zero(value):
    """The mean of nine equal numbers is off by some units in the last place."""
    assert normalized(torch.full((2, 9), value), torch.full((2, 9), 1 / 9)).abs().max() < 0.05


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e9])
def test_normal_values_do_not_depend_on_the_unit_of_rewards(scale):
    x, weight = random(P, 6, seed=15).float(), torch.full((P, 6), 1 / 6)
    torch.testing.assert_close(normalized(x * scale, weight), normalized(x, weight), rtol=1e-4, atol=1e-4)


def test_an_agent_without_samples_that_count_stays_finite():
    assert normalized(random(1, 4, seed=14), torch.zeros(1, 4, dtype=torch.float64)).isfinite().all()


def samples(seed=0, offset=0.0, number=30):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(P, number, 2)) + offset, (rng.random((P, number)) < 0.6).astype(float)


def moments_of(values, weight):
    return Moments.of(torch.from_numpy(values), torch.from_numpy(weight))


def nothing():
    return Moments(np.zeros(P), np.zeros((P, 2)), np.zeros((P, 2)))


def close(one, other):
    for mine, yours in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, yours, atol=1e-12)


def test_moments_are_those_of_the_samples_that_count():
    values, weight = samples()
    moments = moments_of(values, weight)
    values[weight == 0] = 1e9
    close(moments_of(values, weight), moments)
    for p in range(P):
        counted = values[p, weight[p] > 0]
        close(moments.part(slice(p, p + 1)), ([len(counted)], [counted.mean(0)], [counted.var(0)]))


@pytest.mark.parametrize("sizes", [(30,), (1, 29), (7, 11, 12), (0, 15, 0, 15)])
def test_moments_of_parts_merge_in_any_order(sizes):
    values, weight = samples()
    edges = np.cumsum([0, *sizes])
    parts = [slice(*pair) for pair in pairwise(edges)]
    whole = moments_of(values, weight)
    for order in (parts, parts[::-1]):
        merged = nothing()
        for part in order:
            merged = merged.merged(moments_of(values[:, part], weight[:, part]))
        close(merged, whole)


def test_an_agent_that_has_seen_nothing_adds_nothing():
    values, weight = samples()
    weight[1] = 0
    moments = moments_of(values, weight)
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
        merged = merged.merged(moments_of(values[:, part], everything[:, part]))
    np.testing.assert_allclose(merged.variance, values.var(1), rtol=1e-6)


def test_advantages_whose_variance_overflows_are_not_taken_for_equal_ones():
    huge = torch.tensor([[-1e20, 1e20], [1e20, 1.001e20], [-1.0, 1.0]])
    result = normalized(huge, torch.full((3, 2), 0.5))
    assert result[:2].isnan().all()
    torch.testing.assert_close(result[2], huge[2])
