"""Actions by how often they come, what masks leave of choices, and where the bounds of continuous ones lie."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal

from evorl.networks.distributions import DISTRIBUTIONS, allowed

P, B, MANY = 2, 7, 30_000
SPACES = [gym.spaces.Discrete(4), gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Box(-1, 1, (3,))]


def of(space):
    return DISTRIBUTIONS[type(space)](space)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def outputs(distribution, rows=B, seed=0):
    """Random outputs of every head for P agents."""
    return {
        head.name: torch.randn(P, 1 if head.constant else rows, head.outputs, generator=seeded(seed))
        for head in distribution.heads
    }


def repeated(values):
    return {name: value[:, :1].expand(P, MANY, -1) for name, value in values.items()}


def masks(sizes, seed=0):
    """Random masks [P, B, A], different everywhere, that leave something of each choice."""
    generator, parts = seeded(seed), []
    for size in sizes:
        mask = torch.rand(P, B, size, generator=generator) < 0.5
        kept = torch.randint(size, (P, B, 1), generator=generator)
        parts.append(mask.scatter(-1, kept, True))
    return torch.cat(parts, -1)


def chi_square(count, probability):
    expected = probability * count.sum()
    return ((count - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("masked", [False, True])
def test_combinations_of_choices_come_as_often_as_the_product_of_their_probabilities(masked):
    distribution = of(gym.spaces.MultiDiscrete([3, 4]))
    values = outputs(distribution)
    mask = torch.tensor([True, False, True, True, True, False, True]) if masked else torch.ones(7, dtype=torch.bool)
    unclipped = distribution.sample(repeated(values), mask.expand(P, MANY, 7), seeded(1))
    for p in range(P):
        chosen = values["action"][p, 0].masked_fill(~mask, -torch.inf)
        probability = torch.outer(chosen[:3].softmax(-1), chosen[3:].softmax(-1)).flatten()
        count = torch.bincount(unclipped[p, :, 0] * 4 + unclipped[p, :, 1], minlength=12)
        assert not count[probability == 0].any()
        possible = probability > 0
        # 11 or 5 degrees of freedom: 35 is exceeded once in four thousand cases or less.
        assert chi_square(count[possible], probability[possible]) < 35


@pytest.mark.parametrize("sizes", [(5,), (2, 3, 2)])
def test_each_observations_mask_leaves_a_categorical_of_what_it_allows(sizes):
    distribution = of(gym.spaces.Discrete(5) if len(sizes) == 1 else gym.spaces.MultiDiscrete(sizes))
    values, mask = outputs(distribution), masks(sizes)
    values["action"][~mask] += 30
    for seed in range(50):
        unclipped = distribution.sample(values, mask, seeded(seed))
        best = distribution.mode(values, mask)
        likelihood = distribution.likelihood(values, mask, unclipped)
        columns = (unclipped, best) if len(sizes) > 1 else (unclipped.unsqueeze(-1), best.unsqueeze(-1))
        log_prob, entropy = torch.zeros(P, B), torch.zeros(P, B)
        for k, (logits, permitted) in enumerate(
            zip(values["action"].split(sizes, -1), mask.split(sizes, -1), strict=True)
        ):
            for p, b in np.ndindex(P, B):
                places = permitted[p, b].nonzero().flatten()
                assert unclipped.dtype == torch.int64
                assert int(columns[0][p, b, k]) in places
                assert columns[1][p, b, k] == places[logits[p, b, places].argmax()]
                reference = Categorical(logits=logits[p, b, places])
                log_prob[p, b] += reference.log_prob((places == columns[0][p, b, k]).nonzero().squeeze())
                entropy[p, b] += reference.entropy()
        torch.testing.assert_close(likelihood.log_prob, log_prob)
        torch.testing.assert_close(likelihood.entropy, entropy)


@pytest.mark.parametrize("offset", [-1e3, 0.0, 1e3])
def test_the_only_allowed_action_is_certain_however_unlikely_it_was(offset):
    distribution = of(gym.spaces.Discrete(3))
    logits = torch.tensor([[[0.0, offset, 0.0]]], requires_grad=True)
    mask = torch.tensor([[[False, True, False]]])
    assert distribution.sample({"action": logits}, mask, seeded()).tolist() == [[1]]
    likelihood = distribution.likelihood({"action": logits}, mask, torch.tensor([[1]]))
    assert (likelihood.log_prob.item(), likelihood.entropy.item()) == (0.0, 0.0)
    (gradient,) = torch.autograd.grad(likelihood.log_prob.sum() + likelihood.entropy.sum(), logits)
    assert gradient.tolist() == [[[0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("low", [-2e8, -3e38, -np.inf])
def test_no_masked_action_is_taken_by_an_agent_that_diverges(low):
    scores, mask = torch.tensor([[[low, 0.0]]]), torch.tensor([[[True, False]]])
    assert allowed(scores, mask).argmax(-1).item() == 0
    choice = DISTRIBUTIONS[gym.spaces.Discrete](gym.spaces.Discrete(2))
    assert choice.mode({"action": scores}, mask).item() == 0
    assert choice.sample({"action": scores}, mask, torch.Generator()).item() == 0


def test_gradients_with_a_mask_are_those_of_the_allowed_logits_alone():
    distribution = of(gym.spaces.MultiDiscrete([3, 4]))
    values, mask = outputs(distribution), masks((3, 4))
    logits = values["action"].requires_grad_()
    unclipped = distribution.sample(values, mask, seeded())
    likelihood = distribution.likelihood(values, mask, unclipped)
    (gradient,) = torch.autograd.grad(likelihood.log_prob.sum() + 2 * likelihood.entropy.sum(), logits)
    free = logits.detach().clone().requires_grad_()
    total = 0.0
    for k, (part, permitted) in enumerate(zip(free.split([3, 4], -1), mask.split([3, 4], -1), strict=True)):
        reference = Categorical(probs=part.exp() * permitted)
        total = total + reference.log_prob(unclipped[..., k]).sum() + 2 * reference.entropy().sum()
    (expected,) = torch.autograd.grad(total, free)
    torch.testing.assert_close(gradient, torch.where(mask, expected, 0.0), atol=1e-5, rtol=1e-4)
    assert not gradient[~mask].any()


@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
def test_samples_depend_on_the_generator_and_on_nothing_else(space):
    distribution = of(space)
    values = repeated(outputs(distribution))
    before = torch.random.get_rng_state()
    first, again, other = (distribution.sample(values, None, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_each_choice_of_a_table_takes_its_own_number():
    sizes = [[2, 3, 4], [5, 6, 7]]
    distribution = of(gym.spaces.MultiDiscrete(sizes))
    rising = torch.cat([torch.arange(size) for size in np.ravel(sizes)]).float().expand(P, B, -1)
    action = distribution.to_environment(distribution.mode({"action": rising}, None))
    assert torch.equal(action, (torch.tensor(sizes) - 1).expand(P, B, 2, 3))


@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
def test_nothing_is_more_likely_than_the_mode(space):
    distribution = of(space)
    values = outputs(distribution)
    best = distribution.likelihood(values, None, distribution.mode(values, None)).log_prob
    for seed in range(100):
        unclipped = distribution.sample(values, None, seeded(seed))
        assert (distribution.likelihood(values, None, unclipped).log_prob <= best + 1e-6).all()


def test_continuous_samples_are_spread_as_normal_ones_and_independent():
    distribution = of(gym.spaces.Box(-1, 1, (3,)))
    values = outputs(distribution)
    unclipped = distribution.sample(repeated(values), None, seeded(5))
    for p in range(P):
        reference = Normal(values["action"][p, 0], values["log_scale"][p, 0].exp())
        share = reference.cdf(unclipped[p])
        count = torch.stack([torch.histc(share[:, k], 20, 0.0, 1.0) for k in range(3)])
        # 19 degrees of freedom: 50 is exceeded once in seven thousand cases.
        assert all(chi_square(row, torch.full((20,), 0.05)) < 50 for row in count)
        torch.testing.assert_close(torch.corrcoef(unclipped[p].T), torch.eye(3), atol=0.025, rtol=0)


def test_every_number_of_a_box_lies_between_its_own_bounds():
    rng = np.random.default_rng(0)
    low = rng.uniform(-5, 0, (2, 3)).astype(np.float32)
    high = low + rng.uniform(1, 5, (2, 3)).astype(np.float32)
    distribution = of(gym.spaces.Box(low, high))
    for unclipped, expected in (
        (-1.0, low), (-0.5, low + 0.25 * (high - low)), (0.0, (low + high) / 2), (0.5, low + 0.75 * (high - low)),
        (1.0, high), (-40.0, low), (40.0, high),
    ):  # fmt: skip
        action = distribution.to_environment(torch.full((P, B, 6), unclipped))
        torch.testing.assert_close(action, torch.from_numpy(expected).expand(P, B, 2, 3))
    single = torch.zeros(1, 1, 6)
    single[..., 4] = 1.0
    assert distribution.to_environment(single)[0, 0, 1, 1] == pytest.approx(high[1, 1])


def test_one_bound_cuts_and_does_not_scale():
    unclipped = torch.tensor([-9.0, -0.5, 0.25, 0.75, 9.0]).view(1, 5, 1)
    for low, high in ((-np.inf, np.inf), (-0.25, np.inf), (-np.inf, 0.5), (3.0, np.inf), (-np.inf, -3.0)):
        action = of(gym.spaces.Box(low, high, (1,))).to_environment(unclipped)
        torch.testing.assert_close(action, unclipped.clamp(low, high))


def test_whole_numbers_have_the_bounds_of_their_space():
    unclipped = torch.tensor([-7.0, -1.0, 0.0, 0.5, 1.0, 7.0]).view(1, 6, 1)
    action = of(gym.spaces.Box(0, 4, (1,), np.int64)).to_environment(unclipped)
    assert action.flatten().tolist() == [0, 0, 2, 3, 4, 4]
