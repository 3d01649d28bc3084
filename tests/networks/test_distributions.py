"""Distributions against torch's own, what bounds do, and that what is forbidden never happens."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution

from evorl.envs.reading import action_reader
from evorl.networks.distributions import DISTRIBUTIONS, ActionBounds, SquashedGaussian

P, B = 2, 5


def of(space):
    return DISTRIBUTIONS[type(space)](space)


def logits(size, seed=0):
    return {"action": torch.randn(P, B, size, generator=torch.Generator().manual_seed(seed))}


def test_one_choice_has_the_likelihood_of_a_categorical():
    outputs, unclipped = logits(4), torch.randint(4, (P, B))
    likelihood, reference = (
        of(gym.spaces.Discrete(4)).likelihood(outputs, None, unclipped),
        Categorical(logits=outputs["action"]),
    )
    torch.testing.assert_close(likelihood.log_prob, reference.log_prob(unclipped))
    torch.testing.assert_close(likelihood.entropy, reference.entropy())


def gaussian(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "action": torch.randn(P, B, 3, generator=generator),
        "log_scale": torch.randn(P, 1, 3, generator=generator),
    }


def test_continuous_actions_have_the_likelihood_of_independent_normals():
    outputs, unclipped = gaussian(), torch.randn(P, B, 3)
    likelihood = of(gym.spaces.Box(-1, 1, (3,))).likelihood(outputs, None, unclipped)
    reference = Independent(Normal(outputs["action"], outputs["log_scale"].exp().expand(P, B, 3)), 1)
    torch.testing.assert_close(likelihood.log_prob, reference.log_prob(unclipped))
    torch.testing.assert_close(likelihood.entropy, reference.entropy())


def test_a_seed_keeps_its_continuous_samples():
    """The mean plus the scaled noise, not minus, which would have the same distribution."""
    distribution = of(gym.spaces.Box(-1.0, 1.0, (3,)))
    outputs = {"action": torch.randn(P, B, 3), "log_scale": torch.randn(P, 1, 3)}
    noise = torch.randn(P, B, 3, generator=torch.Generator().manual_seed(4))
    drawn = distribution.sample(outputs, None, torch.Generator().manual_seed(4))
    torch.testing.assert_close(drawn, outputs["action"] + outputs["log_scale"].exp() * noise)


def test_bounds_may_be_as_large_as_numbers_go():
    most = np.finfo(np.float32).max
    assert of(gym.spaces.Box(-most, most, (1,))).to_environment(torch.zeros(1, 1, 1)).tolist() == [[[0.0]]]
    unbounded = gym.spaces.Box(-np.inf, np.inf, (1,), dtype=np.int64)
    assert of(unbounded).to_environment(torch.full((1, 1, 1), 3.0)).tolist() == [[[3.0]]]


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_continuous_actions_keep_the_shape_of_the_space(shape):
    distribution = of(gym.spaces.Box(-1, 1, shape))
    size = int(np.prod(shape))
    assert distribution.to_environment(torch.zeros(P, B, size)).shape == (P, B, *shape)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(5), gym.spaces.MultiDiscrete([2, 3])])
def test_the_log_probability_alone_is_that_of_the_likelihood(space):
    outputs, distribution = logits(5), of(space)
    mask = torch.rand(P, B, 5, generator=torch.Generator().manual_seed(3)) < 0.8
    unclipped = distribution.mode(outputs, mask)
    expected = distribution.likelihood(outputs, mask, unclipped).log_prob
    assert torch.equal(distribution.log_prob(outputs, mask, unclipped), expected)


@pytest.mark.parametrize(
    ("make", "space", "masked"),
    [
        (of, gym.spaces.Discrete(5), False),
        (of, gym.spaces.Discrete(5), True),
        (of, gym.spaces.MultiDiscrete([2, 3]), True),
        (of, gym.spaces.Box(-1, 1, (3,)), False),
        (SquashedGaussian, gym.spaces.Box(-1, 1, (3,)), False),
    ],
)
def test_gradients_are_finite_and_lead_back_between_bounds(make, space, masked):
    random, distribution = torch.Generator().manual_seed(11), make(space)

    def drawn(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    outputs = {head.name: drawn(P, 1 if head.constant else B, head.outputs) for head in distribution.heads}
    if "log_scale" in outputs and make is SquashedGaussian:
        outputs["log_scale"][:, :4, 0] = torch.tensor([-9.0, -9.0, 4.0, 4.0])  # Beyond its bounds.
    mask = None
    if masked:
        mask = torch.rand(P, B, 5, generator=random) < 0.6
        mask[..., 0] = mask[..., 2] = True
        mask[0, 0] = False  # Where all is forbidden, no logit counts.
    unclipped = distribution.sample({name: value.float() for name, value in outputs.items()}, mask, random)
    leaves = {name: value.requires_grad_() for name, value in outputs.items()}
    likelihood = distribution.likelihood(leaves, mask, unclipped)
    by_log_prob, by_entropy = drawn(P, B), drawn(P, B)
    total = (by_log_prob * likelihood.log_prob + by_entropy * likelihood.entropy).sum()
    found = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    assert all(gradient.isfinite().all() for gradient in found.values())
    if masked:
        assert not found["action"][~mask].any()
    if make is SquashedGaussian:
        kept = found["log_scale"][:, :4, 0]
        assert ((kept[:, :2] <= 0) & (kept[:, 2:] >= 0)).all(), "a step against it leads back between the bounds"
        assert 0 < kept.count_nonzero() < kept.numel()


def test_a_squashed_gaussian_has_the_density_that_torch_gives_it():
    distribution = SquashedGaussian(gym.spaces.Box(-2.0, 2.0, (3,)))
    numbers = 0.5 * torch.randn(2, P, B, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = {"action": numbers[0].requires_grad_(), "log_scale": numbers[1].requires_grad_()}
    unclipped = distribution.sample(outputs, None, torch.Generator().manual_seed(1))
    tanh = TanhTransform(cache_size=1)
    normal = TransformedDistribution(Normal(outputs["action"], outputs["log_scale"].exp()), tanh)
    found = distribution.log_prob(outputs, None, unclipped)
    expected = Independent(normal, 1).log_prob(tanh(unclipped))
    torch.testing.assert_close(found, expected)
    wanted = list(outputs.values())
    gradients = [torch.autograd.grad(each.sum(), wanted, retain_graph=True) for each in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_log_scales_beyond_their_bounds_come_back():
    """Against clamped log-scales: the gradient of the whole where it leads back, and none where it leads away."""
    distribution, random = SquashedGaussian(gym.spaces.Box(-1.0, 1.0, (4,))), torch.Generator().manual_seed(4)
    raw = torch.tensor([-9.0, -4.0, 1.0, 5.0]).expand(1, 64, 4).clone().requires_grad_()
    mean = torch.randn(1, 64, 4, generator=random)

    def loss(log_scale, bounded):
        outputs = {"action": mean, "log_scale": log_scale}
        outputs = distribution.bounded(outputs) if bounded else outputs
        unclipped = distribution.sample(outputs, None, torch.Generator().manual_seed(5))
        return (0.3 * distribution.log_prob(outputs, None, unclipped) + torch.tanh(unclipped).sum(-1)).sum()

    clamped = raw.detach().clamp(-5.0, 2.0).requires_grad_()
    values = loss(raw, bounded=True), loss(clamped, bounded=False)
    assert torch.equal(*values), "what is inside the bounds, and what is computed beyond them, stays as it was"
    (found,), (whole,) = (torch.autograd.grad(value, each) for value, each in zip(values, (raw, clamped), strict=True))
    torch.testing.assert_close(found[..., 0], whole[..., 0].clamp(max=0.0))
    torch.testing.assert_close(found[..., 1:3], whole[..., 1:3])
    torch.testing.assert_close(found[..., 3], whole[..., 3].clamp(min=0.0))
    assert found[..., 0].any()
    assert found[..., 3].any()


@pytest.mark.parametrize(("log_scale", "error"), [(-3.0, 1e-4), (-0.5, 1e-4), (0.0, 1e-4), (2.0, 0.3)])
@pytest.mark.parametrize("mean", [0.0, 1.5, -4.0])
def test_a_squashed_entropy_is_that_of_its_density(mean, log_scale, error):
    distribution = SquashedGaussian(gym.spaces.Box(-1.0, 1.0, (1,)))
    outputs = {"action": torch.full((1, 1, 1), mean), "log_scale": torch.full((1, 1, 1), log_scale)}
    found = distribution.likelihood(outputs, None, torch.zeros(1, 1, 1))
    # Over the number before the tanh, where the density of the action times the slope is that of the normal.
    z = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    unclipped = mean + np.exp(log_scale) * z
    doubled = {name: value.double() for name, value in outputs.items()}
    log_density = distribution.log_prob(doubled, None, unclipped.view(1, -1, 1))[0]
    share = torch.softmax(-0.5 * z.square(), 0)
    assert float(found.entropy) == pytest.approx(float(-(share * log_density).sum()), abs=error)
    assert torch.equal(found.log_prob, distribution.log_prob(outputs, None, torch.zeros(1, 1, 1)))


def test_a_squashed_entropy_has_the_gradient_of_many_samples():
    distribution = SquashedGaussian(gym.spaces.Box(-2.0, 2.0, (2,)))
    outputs = {"action": torch.tensor([[[0.5, -1.0]]]), "log_scale": torch.tensor([[[-0.5, 0.2]]])}
    outputs = {name: value.requires_grad_() for name, value in outputs.items()}
    entropy = distribution.likelihood(outputs, None, torch.zeros(1, 1, 2)).entropy.sum()
    found = torch.autograd.grad(entropy, list(outputs.values()))
    repeated = {name: value.expand(1, 400_000, 2) for name, value in outputs.items()}
    sampled = distribution.sample(repeated, None, torch.Generator().manual_seed(0))
    estimate = -distribution.log_prob(repeated, None, sampled).mean()
    for one, other in zip(found, torch.autograd.grad(estimate, list(outputs.values())), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.01)


def test_a_squashed_density_has_digits_where_the_tanh_has_none():
    """The tanh of 30 is 1 in single precision, and the logarithm of the slope there is 2 (log 2 - 30)."""
    distribution = SquashedGaussian(gym.spaces.Box(-1.0, 1.0, (1,)))
    outputs = {"action": torch.full((1, 1, 1), 30.0), "log_scale": torch.zeros(1, 1, 1)}
    for mean in (30.0, -30.0):
        outputs["action"][:] = mean
        found = distribution.log_prob(outputs, None, outputs["action"])
        expected = -0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - 30.0)
        assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("low", "high", "expected"), [(-2.0, 2.0, 0.0), (1.0, 3.0, 1.0), (-np.inf, np.inf, 0.0)])
def test_an_action_of_nan_is_what_environments_take_it_for(low, high, expected):
    """Else a replay would hold another action than the one that was taken, and fault all agents that draw it."""
    space = gym.spaces.Box(low, high, (1,))
    acted = ActionBounds(space).to_environment(torch.tensor([[[np.nan], [np.inf]]]))
    assert acted[0, 0, 0] == expected
    assert acted[0, 1, 0] == high
    taken = action_reader(space, 1)(np.array([[np.nan]], np.float32))
    assert taken[0, 0] == expected


def test_actions_come_back_from_the_environments():
    space = gym.spaces.Box(np.array([[0.0], [-3.0]], np.float32), np.array([[4.0], [-3.0]], np.float32))
    bounds, action = ActionBounds(space), torch.tensor([[[0.5, 0.0], [-1.0, 0.0]]])
    given = bounds.to_environment(action)
    torch.testing.assert_close(given, torch.tensor([[[[3.0], [-3.0]], [[0.0], [-3.0]]]]))
    torch.testing.assert_close(bounds.from_environment(given), action)
