"""Each formula against its paper, by hand or by loops."""

import math

import numpy as np
import pytest
import torch

from evorl.algorithms.functional import (
    approximate_kl,
    bootstrapped_atoms,
    bootstrapped_return,
    categorical_projection,
    clip_fraction,
    clipped_surrogate,
    clipped_weight,
    cross_entropy,
    dueling,
    explained_variance,
    gae,
    impact_log_ratio,
    of_action,
    policy_gradient,
    quantile_huber,
    td_target,
    temperature_loss,
    v_trace,
)
from evorl.types.batches import Segment

T, P, B = 10, 3, 4
GAMMA = torch.tensor([0.9, 0.99, 0.5], dtype=torch.float64)
TRACE = torch.tensor([0.95, 0.4, 0.7], dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CLIP = torch.tensor([0.1, 0.3, 0.5], dtype=torch.float64)


def derivative(loss, x):
    """The derivative of a loss [P, B] of `x` [P, B, ...], whose entry [p, b] depends only on that of `x`."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return gradient


def test_dueling_by_hand():
    """A value of 5 and advantages of 1, 2 and 6, whose mean is 3."""
    found = dueling(torch.tensor([[[5.0]]]), torch.tensor([[[[1.0], [2.0], [6.0]]]]))
    assert found.flatten().tolist() == [3.0, 4.0, 8.0]


def test_the_temperature_loss_by_hand():
    # An entropy below its target makes descent raise the logarithm of the temperature.
    log_temperature = torch.zeros(1, 1, requires_grad=True)
    loss = temperature_loss(log_temperature, torch.tensor([[0.5]]), torch.tensor([[0.7]]))
    assert torch.autograd.grad(loss, log_temperature)[0].item() == pytest.approx(-0.2)


def test_impact_bounds_by_the_target_network():
    worker, target = torch.full((1, 3), -1.0), torch.tensor([[0.0, 0.5, -2.0]])
    found = impact_log_ratio(torch.full((1, 3), -1.2), worker, target).exp()
    # Worker, target, policy: e^-1, e^(-1 + log ratio), e^-1.2.
    expected = [math.exp(-0.2), math.exp(-1.2) / math.exp(-0.5), 2 * math.exp(-0.2)]
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_the_clip_fraction_counts_ratios_beyond_the_clip_of_each_agent():
    ratio = torch.tensor([0.85, 1.15, 0.95]).expand(2, 3)
    found = clip_fraction(ratio.log(), torch.tensor([0.1, 0.2]))
    assert found.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda one, other: policy_gradient(one, other),
            r"policy_gradient: advantage has the shape \[3, 4, 1\], and log",
        ),
        (lambda one, other: clipped_surrogate(one, other, CLIP), "clipped_surrogate: advantage"),
        (lambda one, other: quantile_huber(other, one, 1.0), "quantile_huber: quantiles"),
        (lambda one, other: gae(Segment(one, other, *[one] * 4), GAMMA, TRACE), "segment: value"),
        (lambda one, other: bootstrapped_return({"reward": one}, GAMMA, other), "bootstrapped_return: next_value"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(P, B), random(P, B, 1))


@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_the_surrogate_moves_the_ratio_unless_it_has_gone_far_enough_the_right_way(advantage):
    """The first agent's ratio may come to 0.9 or 1.1, the second's to 0.5 or 1.5."""
    ratio = torch.tensor([0.2, 0.7, 0.95, 1.0, 1.05, 1.3, 2.0], dtype=torch.float64).expand(2, 7)
    clip = torch.tensor([0.1, 0.5], dtype=torch.float64)

    def loss(log_ratio):
        return clipped_surrogate(log_ratio, torch.full_like(ratio, advantage), clip)

    objective, gradient = loss(ratio.log()), derivative(loss, ratio.log())
    for p, b in np.ndindex(2, 7):
        now, edge = float(ratio[p, b]), 1 + math.copysign(float(clip[p]), advantage)
        enough = now > edge if advantage > 0 else now < edge
        assert objective[p, b].item() == pytest.approx(-advantage * (edge if enough else now))
        assert gradient[p, b].item() == pytest.approx(0.0 if enough else -advantage * now)


@pytest.mark.parametrize(("advantage", "objective"), [(1.0, -1.2), (0.0, 0.0)])
def test_a_ratio_beyond_single_precision_has_no_gradient_where_it_is_clipped(advantage, objective):
    def loss(log_ratio):
        return clipped_surrogate(log_ratio, torch.tensor([[advantage]]), torch.tensor([0.2]))

    log_ratio = torch.tensor([[100.0]])
    assert loss(log_ratio).item() == pytest.approx(objective)
    assert derivative(loss, log_ratio).item() == 0.0
    assert math.isfinite(approximate_kl(log_ratio).item())


def test_the_divergence_is_never_negative_and_zero_for_equal_policies():
    assert (approximate_kl(random(2, 50)) >= 0).all()
    assert not approximate_kl(torch.zeros(2, 50)).any()
    assert approximate_kl(torch.tensor([[math.log(0.5)]])).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("log_ratio", [1e-4, -1e-4, 1e-3])
def test_small_divergences_are_not_lost_in_rounding(log_ratio):
    found = approximate_kl(torch.tensor([[log_ratio]], dtype=torch.float32))
    assert found.item() == pytest.approx(log_ratio**2 / 2, rel=1e-2)


def test_the_expected_policy_gradient_is_that_of_the_expected_advantage():
    logits, advantage = random(2, 5, seed=10).requires_grad_(), random(2, 5, seed=11)
    logs = logits.log_softmax(-1)
    probability = logs.detach().exp()
    (expected,) = torch.autograd.grad((logs.exp() * advantage).sum(), logits, retain_graph=True)
    loss = policy_gradient(logs, advantage)
    (found,) = torch.autograd.grad((probability * loss).sum(), logits)
    torch.testing.assert_close(found, -expected)


def test_explained_variance():
    target = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    prediction = torch.tensor([[1.0, 2.0, 4.0, 0.0], [2.5, 2.5, 2.5, 2.5]])
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    # Errors 0, 0, -1 have a variance of 2/9, targets 1, 2, 3 of 2/3; what has no weight does not count.
    expected = torch.tensor([1 - (2 / 9) / (2 / 3), 0.0])
    torch.testing.assert_close(explained_variance(prediction, target, weight), expected)
    torch.testing.assert_close(explained_variance(target, target, weight), torch.ones(2))


@pytest.mark.parametrize("target", [0.0, 1.0, 99.9, -200.7])
def test_nothing_of_constant_targets_is_explained(target):
    weight = torch.full((1, 341), 1 / 341)
    prediction = torch.randn(1, 341, generator=torch.Generator().manual_seed(0))
    assert explained_variance(prediction, torch.full((1, 341), target), weight).item() == 0
    assert explained_variance(prediction, torch.full((1, 341), math.nan), weight).isnan()


def test_the_cross_entropy_is_least_at_the_target_where_its_gradient_is_zero():
    target = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
    logits = (target + 1e-9).log()
    found, gradient = cross_entropy(logits, target), derivative(lambda logits: cross_entropy(logits, target), logits)
    torch.testing.assert_close(found, torch.tensor([[1.5 * math.log(2), 0.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)
    even = torch.full((1, 1, 4), 0.25)
    assert cross_entropy(torch.zeros(1, 1, 4), even).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 5.0])
def test_the_quantile_loss_is_a_sum_over_quantiles_and_a_mean_over_samples(kappa):
    prediction, samples = random(2, 3, 4, seed=1), random(2, 3, 5, seed=2)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for p, b, i, j in np.ndindex(2, 3, 4, 5):
        error = float(samples[p, b, j] - prediction[p, b, i])
        size = abs(error)
        huber = size if kappa == 0 else (size**2 / 2 if size <= kappa else kappa * (size - kappa / 2)) / kappa
        expected[p, b] += abs((i + 0.5) / 4 - (error < 0)) * huber / 5
    torch.testing.assert_close(quantile_huber(prediction, samples, kappa), expected)


def test_one_step_targets_bootstrap_unless_terminated():
    result = td_target(
        torch.tensor([[1.0, 1.0], [2.0, 0.5]]),
        torch.tensor([[False, True], [False, False]]),
        torch.tensor([[0.5], [0.9]]),
        torch.tensor([[10.0, 10.0], [10.0, -1.0]]),
    )
    torch.testing.assert_close(result, torch.tensor([[6.0, 1.0], [11.0, -0.4]]))


def test_the_atoms_of_an_action_are_its_own():
    atoms = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    action = torch.tensor([[0, 3, 1], [2, 2, 0]])
    expected = [[atoms[p, b, action[p, b]].tolist() for b in range(3)] for p in range(2)]
    assert of_action(atoms, action).tolist() == expected


def rollout(seed):
    """Random steps, of which some end an episode and some are no transitions; NaN where no next value is defined."""
    reward, value, next_value = random(3, T, P, B, seed=seed)
    chance, valid = torch.rand(2, T, P, B, generator=torch.Generator().manual_seed(seed))
    terminated, truncated = chance < 0.15, (chance >= 0.15) & (chance < 0.3)
    assert terminated.any()
    assert truncated.any()
    defined = truncated.clone()
    defined[-1] = ~terminated[-1]
    next_value.masked_fill_(~defined, torch.nan)
    return Segment(reward, value, next_value, terminated, truncated, valid < 0.9)


class Step:
    """One step of a rollout, read plainly: whether anything flows back across its end, and its td_error."""

    def __init__(self, segment, t, p, b, gamma):
        one = Segment(*(values[:, p, b] for values in segment))
        self.is_last = t == T - 1 or bool(one.terminated[t] | one.truncated[t] | ~one.valid[t])
        self.following = one.next_value[t] if t == T - 1 or one.truncated[t] else one.value[t + 1]
        if one.terminated[t]:
            self.following = 0.0
        self.error = one.reward[t] + gamma[p] * self.following - one.value[t] if one.valid[t] else 0.0


@pytest.mark.parametrize("gamma", [GAMMA, -GAMMA], ids=["one agent", "seats that alternate"])
def test_advantages_are_sums_of_discounted_errors_up_to_the_end_of_the_episode(gamma):
    segment, expected = rollout(seed=0), torch.zeros(T, P, B, dtype=torch.float64)
    for t, p, b in np.ndindex(T, P, B):
        for k in range(t, T):
            step = Step(segment, k, p, b, gamma)
            expected[t, p, b] += (gamma[p] * TRACE[p]) ** (k - t) * step.error
            if step.is_last:
                break
    torch.testing.assert_close(gae(segment, gamma, TRACE), expected)


@pytest.mark.parametrize("trace", [1.0, 0.9, 0.0])
def test_v_trace_equals_the_sums_of_the_paper(trace):
    """Its equation 1 for one step after the other: sums of errors, each by the product of all traces before it.

    Advantages bootstrap from the target of the next state and its value, in the proportions trace and 1 - trace.
    """
    segment, log_ratio = rollout(seed=1), 0.5 * random(T, P, B, seed=2)
    rho, expected = log_ratio.exp().clamp(max=1), segment.value.clone()
    target, advantage = v_trace(clipped_weight(log_ratio), segment, GAMMA, torch.full((P,), trace, dtype=torch.float64))
    for t, p, b in np.ndindex(T, P, B):
        product = 1.0
        for k in range(t, T):
            step = Step(segment, k, p, b, GAMMA)
            expected[t, p, b] += product * rho[k, p, b] * step.error
            if step.is_last:
                break
            product *= GAMMA[p] * trace * rho[k, p, b]
    torch.testing.assert_close(target, expected)
    for t, p, b in np.ndindex(T, P, B):
        step = Step(segment, t, p, b, GAMMA)
        gain = step.error
        if not step.is_last:
            gain = gain + GAMMA[p] * trace * (expected[t + 1, p, b] - step.following)
        torch.testing.assert_close(advantage[t, p, b], torch.as_tensor(gain, dtype=torch.float64))


def test_a_projection_is_the_papers_algorithm_and_keeps_probability_and_mean():
    low, high, atoms = -2.0, 3.0, 11
    probabilities, returns = random(P, B, atoms).softmax(-1), 1.5 * random(P, B, atoms, seed=9)
    returns[0, 0] = torch.linspace(low, high, atoms)
    found = categorical_projection(probabilities, returns, low, high)
    expected, step = torch.zeros_like(found), (high - low) / (atoms - 1)
    for p, b, j in np.ndindex(P, B, atoms):
        place = (min(max(float(returns[p, b, j]), low), high) - low) / step
        below, above = math.floor(place + 1e-12), math.ceil(place - 1e-12)
        share = float(probabilities[p, b, j])
        if below == above:
            expected[p, b, below] += share
        else:
            expected[p, b, below] += share * (above - place)
            expected[p, b, above] += share * (place - below)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0, 0], probabilities[0, 0])
    torch.testing.assert_close(found.sum(-1), torch.ones(P, B, dtype=torch.float64))
    support = torch.linspace(low, high, atoms, dtype=torch.float64)
    torch.testing.assert_close(found @ support, (probabilities * returns.clamp(low, high)).sum(-1))


def test_what_is_no_number_stays_none_and_harms_nothing_else():
    probabilities, returns = torch.full((1, 2, 3), 1 / 3), torch.zeros(1, 2, 3)
    returns[0, 1, 0] = torch.nan
    found = categorical_projection(probabilities, returns, 0.0, 2.0)
    assert found[0, 1].isnan().any()
    assert found[0, 0].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("several", [False, True])
def test_each_atom_bootstraps_as_a_value_does(several):
    columns = {"reward": random(P, B, seed=1), "terminated": random(P, B, seed=2) > 0.5}
    if several:
        columns["discount"] = random(P, B, seed=3)
    atoms = random(P, B, 5, seed=4)
    found = bootstrapped_atoms(columns, GAMMA, atoms)
    for n in range(5):
        torch.testing.assert_close(found[..., n], bootstrapped_return(columns, GAMMA, atoms[..., n]))
