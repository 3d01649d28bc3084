"""Losses of actor-critics, of agents with limits of their own."""

import math

import numpy as np
import pytest
import torch

from evorl.algorithms.losses import (
    approximate_kl,
    clipped_surrogate,
    clipped_value_error,
    cross_entropy,
    explained_variance,
    policy_gradient,
    quantile_huber,
    value_error,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_the_surrogate_moves_the_ratio_unless_it_has_gone_far_enough_the_right_way(advantage):
    """The first agent's ratio may come to 0.9 or 1.1, the second's to 0.5 or 1.5."""
    ratio = torch.tensor([0.2, 0.7, 0.95, 1.0, 1.05, 1.3, 2.0], dtype=torch.float64).expand(2, 7)
    clip = torch.tensor([0.1, 0.5], dtype=torch.float64)
    objective, gradient = clipped_surrogate(ratio.log(), torch.full_like(ratio, advantage), clip)
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
    error, gradient = clipped_value_error(now, before, goal, torch.tensor([0.5]))
    assert (error.item(), gradient.item()) == pytest.approx((expected, slope))


def test_each_agents_values_have_its_own_bound():
    error, _ = clipped_value_error(
        torch.full((2, 1), 4.0), torch.zeros(2, 1), torch.full((2, 1), 5.0), torch.tensor([1.0, 3.0])
    )
    torch.testing.assert_close(error, torch.tensor([[0.5 * 4.0**2], [0.5 * 2.0**2]]))


def test_the_divergence_is_never_negative_and_zero_for_equal_policies():
    assert (approximate_kl(random(2, 50)) >= 0).all()
    assert not approximate_kl(torch.zeros(2, 50)).any()
    assert approximate_kl(torch.tensor([[math.log(0.5)]])).item() == pytest.approx(0.5 - 1 + math.log(2))


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
    probability = logs.detach().exp()
    (expected,) = torch.autograd.grad((logs.exp() * advantage).sum(), logits, retain_graph=True)
    loss, slope = policy_gradient(logs, advantage)
    (found,) = torch.autograd.grad((probability * loss).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, -expected)
    (found,) = torch.autograd.grad(logs, logits, probability * slope)
    torch.testing.assert_close(found, -expected)


def test_the_derivative_of_the_squared_error():
    value, target = random(2, 5, seed=12).requires_grad_(), random(2, 5, seed=13)
    error, slope = value_error(value, target)
    torch.testing.assert_close(error, (value - target) ** 2 / 2)
    torch.testing.assert_close(slope, torch.autograd.grad(error.sum(), value)[0])


def test_explained_variance():
    target = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    prediction = torch.tensor([[1.0, 2.0, 4.0, 0.0], [2.5, 2.5, 2.5, 2.5]])
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    # Errors 0, 0, -1 have a variance of 2/9, targets 1, 2, 3 of 2/3; what has no weight does not count.
    expected = torch.tensor([1 - (2 / 9) / (2 / 3), 0.0])
    torch.testing.assert_close(explained_variance(prediction, target, weight), expected)
    torch.testing.assert_close(explained_variance(target, target, weight), torch.ones(2))


def test_the_cross_entropy_is_least_at_the_target_where_its_gradient_is_zero():
    target = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
    logits = (target + 1e-9).log().requires_grad_()
    found = cross_entropy(logits, target)
    torch.testing.assert_close(found, torch.tensor([[1.5 * math.log(2), 0.0]]), atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)
    assert cross_entropy(torch.zeros(1, 1, 4), torch.full((1, 1, 4), 0.25)).item() == pytest.approx(math.log(4))


def test_the_quantile_loss_by_hand():
    """Levels 1/4 and 3/4 of quantiles 0 and 2, for samples 3 and -0.5, with a kappa of 1."""
    prediction, samples = torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[3.0, -0.5]]])
    first = (0.25 * (3 - 0.5) + 0.75 * 0.5 * 0.5**2) / 2
    second = (0.75 * 0.5 * 1.0**2 + 0.25 * (2.5 - 0.5)) / 2
    assert quantile_huber(prediction, samples, 1.0)[0].item() == pytest.approx(first + second)
    without = (0.25 * 3 + 0.75 * 0.5 + 0.75 * 1 + 0.25 * 2.5) / 2
    assert quantile_huber(prediction, samples, 0.0)[0].item() == pytest.approx(without)


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 5.0])
def test_the_quantile_loss_is_a_sum_over_quantiles_and_a_mean_over_samples(kappa):
    prediction, samples = random(2, 3, 4, seed=1), random(2, 3, 5, seed=2)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for p, b, i, j in np.ndindex(2, 3, 4, 5):
        error = float(samples[p, b, j] - prediction[p, b, i])
        size = abs(error)
        huber = size if kappa == 0 else (size**2 / 2 if size <= kappa else kappa * (size - kappa / 2)) / kappa
        expected[p, b] += abs((i + 0.5) / 4 - (error < 0)) * huber / 5
    torch.testing.assert_close(quantile_huber(prediction, samples, kappa)[0], expected)


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0])
def test_the_quantile_loss_has_the_slope_of_its_differences_in_any_parts(kappa, monkeypatch):
    prediction, samples = random(2, 7, 4, seed=1), random(2, 7, 5, seed=2)
    whole = quantile_huber(prediction, samples, kappa)
    monkeypatch.setattr("evorl.algorithms.losses.CACHED", 2 * 4 * 5 * 3)
    for one, other in zip(quantile_huber(prediction, samples, kappa), whole, strict=True):
        assert torch.equal(one, other)
    for quantile in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[quantile] = 1e-6
        ends = (quantile_huber(prediction + sign * step, samples, kappa)[0] for sign in (1, -1))
        torch.testing.assert_close(whole[1][..., quantile], (next(ends) - next(ends)) / 2e-6, rtol=1e-4, atol=1e-6)


def test_the_quantile_loss_is_least_at_the_quantiles():
    samples = random(1, 1, 4001, seed=3) * 2 + 1
    levels = (torch.arange(4, dtype=torch.float64) + 0.5) / 4
    prediction = torch.quantile(samples, levels).view(1, 1, 4)
    assert quantile_huber(prediction, samples, 0.0)[1].abs().max() < 1e-3
    assert quantile_huber(prediction + 0.5, samples, 0.0)[1].min() > 0.03
