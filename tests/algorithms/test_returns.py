"""Advantages where agents differ and episodes end."""

import math

import numpy as np
import pytest
import torch

from evorl.algorithms.returns import bootstrapped_atoms, bootstrapped_return, categorical_projection, gae

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


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_sums_of_discounted_errors_up_to_the_end_of_the_episode(seed):
    """Whatever the next values are: those of truncated episodes are not the values of the next step."""
    reward, value, next_value, terminated, ended = rollout(seed)
    next_value, expected = random(T, P, B, seed=seed + 100), torch.zeros(T, P, B, dtype=torch.float64)
    for t, p, b in np.ndindex(T, P, B):
        for k in range(t, T):
            following = 0.0 if terminated[k, p, b] else next_value[k, p, b]
            error = reward[k, p, b] + GAMMA[p] * following - value[k, p, b]
            expected[t, p, b] += (GAMMA[p] * TRACE[p]) ** (k - t) * error
            if ended[k, p, b]:
                break
    torch.testing.assert_close(gae(reward, value, next_value, terminated, ended, GAMMA, TRACE), expected)


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


def test_a_projection_by_hand():
    """Values 0, 1 and 2: 0.25 lies a quarter of the way from 0 to 1, 1 is a value itself, 7 and -3 lie outside."""
    probabilities = torch.tensor([[[0.4, 0.5, 0.1], [0.2, 0.3, 0.5]]])
    returns = torch.tensor([[[0.25, 1.0, 7.0], [-3.0, 2.0, 1.5]]])
    expected = torch.tensor([[[0.3, 0.6, 0.1], [0.2, 0.25, 0.55]]])
    torch.testing.assert_close(categorical_projection(probabilities, returns, 0.0, 2.0), expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_projection_is_the_papers_algorithm_and_keeps_probability_and_mean(seed):
    low, high, atoms = -2.0, 3.0, 11
    probabilities, returns = random(P, B, atoms, seed=seed).softmax(-1), 1.5 * random(P, B, atoms, seed=seed + 9)
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
