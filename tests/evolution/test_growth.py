"""Mutations of hidden layers: growth changes nothing that an agent computes, and nothing that was learned gets lost."""

import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import agent, algorithm, batch, check_tensors, population, seen

from evorl.config import ArchitectureLimits
from evorl.evolution import mutation as operations
from evorl.networks.stack import SIGMA
from evorl.types.agents import Architecture

KINDS = list(itertools.product((False, True), (False, True)))


def outputs(member, dqn, seed=0):
    stack = population([member], dqn).policy.stacks[0]
    now, target = stack.networks["q"], stack.target_networks["q"]
    observation = torch.randn(1, 50, 5, generator=torch.Generator().manual_seed(seed))
    return dqn.q_values(now(seen(observation))), dqn.q_values(target(seen(observation)))


def made(dueling, *options):
    return algorithm(f"algorithm.dueling={dueling}", *options), "last" if dueling else "shared"


def trained(activation, layer_norm, branches, dqn):
    group = population([agent(Architecture((20, 24), (1, 0), activation, layer_norm, branches), dqn=dqn)], dqn)
    for seed in range(3):
        group.update(batch(group.policy.agents, seed=seed))
    return group.to_agents()[0]


def check_function_kept(member, dqn, *changes):
    before = outputs(member, dqn)
    for change in changes:
        change()
        check_tensors(member, dqn)
        for was, now in zip(before, outputs(member, dqn), strict=True):
            torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layer_norm", "dueling"), KINDS)
def test_growth_preserves_the_function(layer_norm, dueling):
    (dqn, branches), rng = made(dueling), np.random.default_rng(3)
    member = trained("gelu", layer_norm, branches, dqn)
    check_function_kept(
        member,
        dqn,
        lambda: operations.enlarge(member, dqn.networks, "q", "hidden.0", 37, rng),
        lambda: operations.enlarge(member, dqn.networks, "q", "hidden.1", 50, rng),
        lambda: operations.add_layer(member, dqn.networks, "q", "hidden.0", rng),
        lambda: operations.add_layer(member, dqn.networks, "q", "hidden.1", rng),
        lambda: operations.enlarge(member, dqn.networks, "q", "hidden.1", 70, rng),
    )
    assert member.architectures["q"].hidden_sizes == (37, 70)
    assert member.architectures["q"].residual_layers == (2, 1)


@pytest.mark.parametrize("dueling", [False, True])
def test_growth_preserves_the_function_of_noisy_layers_mean_weights(dueling):
    (dqn, branches), rng = made(dueling, "algorithm.noisy={sigma: 0.4}"), np.random.default_rng(3)
    member = trained("relu", False, branches, dqn)
    check_function_kept(
        member,
        dqn,
        lambda: operations.enlarge(member, dqn.networks, "q", "hidden.0", 37, rng),
        lambda: operations.enlarge(member, dqn.networks, "q", "hidden.1", 50, rng),
        lambda: operations.add_layer(member, dqn.networks, "q", "hidden.1", rng),
        lambda: operations.add_layer(member, dqn.networks, "q", "hidden.0", rng),
    )
    scales = {name: value for name, value in member.tensors["q"]["parameters"].items() if name.startswith(SIGMA)}
    head = "advantage" if dueling else "q_values"
    assert not scales[f"{SIGMA}{head}.weight"][24:].any(), "new units are read without noise too"
    fresh = scales[f"{SIGMA}hidden.1.weight"][..., 24:]
    torch.testing.assert_close(fresh[..., :20, :], torch.full_like(fresh[..., :20, :], 0.4 / math.sqrt(37)))
    assert f"{SIGMA}hidden.1.residual.0.weight" in scales
    operations.reduce(member, dqn.networks, "q", "hidden.1", 24)
    operations.remove_residual_layer(member, dqn.networks, "q", "hidden.1")
    check_tensors(member, dqn)


@pytest.mark.parametrize(("layer_norm", "dueling"), KINDS)
def test_what_has_grown_learns(layer_norm, dueling):
    (dqn, branches), rng = made(dueling), np.random.default_rng(3)
    member = trained("relu", layer_norm, branches, dqn)
    operations.enlarge(member, dqn.networks, "q", "hidden.1", 30, rng)
    operations.add_layer(member, dqn.networks, "q", "hidden.1", rng)
    born = {name: value.clone() for name, value in member.tensors["q"]["parameters"].items()}
    group = population([member], dqn)
    for seed in range(3):
        group.update(batch(group.policy.agents, seed=seed))
    after = group.to_agents()[0].tensors["q"]["parameters"]
    read = (after["advantage.weight" if branches == "last" else "q_values.weight"][24:] != 0).all(1)
    assert read.sum() >= 4, "new units are read after a few steps, but for those whose ReLU is off for the whole batch"
    assert (after["hidden.1.residual.0.scale"] != 0).any(-1).all(), "so is the new layer, in every branch"
    moved = after["hidden.1.weight"][..., 24:] != born["hidden.1.weight"][..., 24:]
    assert moved.flatten(-2).any(-1).all()


def test_moments_of_surviving_weights_survive():
    dqn = algorithm()
    member = trained("relu", False, "shared", dqn)
    before = {role: dict(member.tensors["q"][role]) for role in ("mean", "square", "target")}
    operations.enlarge(member, dqn.networks, "q", "hidden.1", 40, np.random.default_rng(0))
    for role in ("mean", "square"):
        moments = member.tensors["q"][role]
        assert before[role]["hidden.1.weight"].any()
        torch.testing.assert_close(moments["hidden.1.weight"][:, :24], before[role]["hidden.1.weight"])
        torch.testing.assert_close(moments["q_values.weight"][:24], before[role]["q_values.weight"])
    new = (
        member.tensors["q"]["mean"]["hidden.1.weight"][:, 24:],
        member.tensors["q"]["square"]["hidden.1.weight"][:, 24:],
    )
    assert not new[0].any()
    torch.testing.assert_close(new[1], before["square"]["hidden.1.weight"].mean().expand(20, 16))
    operations.reduce(member, dqn.networks, "q", "hidden.1", 24)
    for role in ("mean", "square", "target"):
        for name, value in before[role].items():
            torch.testing.assert_close(member.tensors["q"][role][name], value)


@pytest.fixture(scope="module")
def veteran():
    """An agent whose bias correction is nearly over."""
    dqn = algorithm("algorithm.tau=0.01")
    group = population([agent(Architecture((64, 64), (0, 0), "relu"), dqn=dqn)], dqn)
    for seed in range(400):
        group.update(batch(group.policy.agents, size=64, seed=seed))
    return dqn, group.to_agents()[0]


GROWTHS = {
    "a wider first layer": lambda *given: operations.enlarge(given[0], given[1], "q", "hidden.0", 96, given[2]),
    "a wider last layer": lambda *given: operations.enlarge(given[0], given[1], "q", "hidden.1", 96, given[2]),
    "another layer": lambda *given: operations.add_layer(given[0], given[1], "q", "hidden.1", given[2]),
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_new_weights_step_no_further_than_under_a_fresh_adam(growth, veteran):
    """That moves a weight by the learning rate first; here moments of zero made it 1.8 times as far."""
    dqn, parent = veteran

    def first_update(member):
        before, answers = member.tensors["q"]["parameters"], outputs(member, dqn)[0].clone()
        group = population([member.child(1)], dqn)
        group.update(batch(group.policy.agents, size=64, seed=1000))
        after = group.to_agents()[0]
        steps = {name: (value - before[name]).abs() for name, value in after.tensors["q"]["parameters"].items()}
        return steps, (outputs(after, dqn)[0] - answers).abs().mean()

    _, usual = first_update(parent)
    child = parent.child(1)
    GROWTHS[growth](child, dqn.networks, np.random.default_rng(0))
    steps, moved = first_update(child)
    old = parent.tensors["q"]["parameters"]
    for name, step in steps.items():
        if name in old:
            step[tuple(slice(size) for size in old[name].shape)] = 0
    furthest = max(step.max() for step in steps.values())
    assert 0 < furthest <= parent.hyperparameters["learning_rate"]
    assert moved < 1.3 * usual


def test_streams_take_their_own_steps():
    """The gradients of a policy and of a value may differ by orders of magnitude."""
    dqn, branches = made(dueling=True)
    member = trained("relu", False, branches, dqn)
    square = member.tensors["q"]["square"]
    for name in ("hidden.1.weight", "hidden.1.bias"):
        square[name][1] = 1e6
    operations.add_layer(member, dqn.networks, "q", "hidden.1", np.random.default_rng(0))
    operations.enlarge(member, dqn.networks, "q", "hidden.1", 30, np.random.default_rng(0))
    for name in ("hidden.1.weight", "hidden.1.residual.0.weight", "hidden.1.residual.0.scale"):
        policy, value = member.tensors["q"]["square"][name][..., 24:]
        assert policy.max() < 1
        assert value.min() > 1e5


@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_layer_after_one_that_reads_a_single_number_takes_over_the_moments_of_its_weights(layer_norm):
    dqn = algorithm(observations=gym.spaces.Box(-1.0, 1.0, (1,)))
    member = agent(Architecture((8,), (0,), "relu", layer_norm), dqn=dqn)
    square = member.tensors["q"]["square"]
    square["hidden.0.weight.observation"].fill_(3.0)
    operations.add_layer(member, dqn.networks, "q", "hidden.0", np.random.default_rng(0))
    grown = member.tensors["q"]["square"]
    assert (grown["hidden.0.residual.0.weight"] == 3.0).all()
    assert (grown["hidden.0.residual.0.bias"] == 0.0).all()


@pytest.mark.parametrize("options", [(), ("algorithm.noisy={sigma: 0.4}",)], ids=["plain", "noisy"])
def test_the_units_that_are_read_least_go_first_however_much_noise_they_have(options):
    dqn = algorithm(*options)
    member = agent(dqn=dqn)
    for role in ("parameters", "target"):
        tensors = member.tensors["q"][role]
        tensors["q_values.weight"][[3, 7]] = 0
        if options:
            tensors[f"{SIGMA}q_values.weight"][[3, 7]] = 100
    before = outputs(member, dqn)
    operations.reduce(member, dqn.networks, "q", "hidden.1", 14)
    assert member.architectures["q"].hidden_sizes == (16, 14)
    torch.testing.assert_close(outputs(member, dqn), before)


@pytest.mark.parametrize("options", [(), ("algorithm.noisy={sigma: 0.4}",)], ids=["plain", "noisy"])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_long_chain_of_mutations_stays_inside_the_limits_and_consistent(layer_norm, dueling, options, monkeypatch):
    monkeypatch.setattr(operations, "UNIT_STEPS", (1, 9))
    (dqn, branches), rng = made(dueling, *options), np.random.default_rng(5)
    limits = ArchitectureLimits(max_layers=4, min_units=3, max_units=40)
    member = agent(Architecture((16, 16), (0, 0), "silu", layer_norm, branches), dqn=dqn)
    seen = set()
    for _ in range(150):
        mutate = operations.mutate_layers if rng.random() < 0.5 else operations.mutate_units
        mutate(member, dqn.networks, limits, rng)
        shape = member.architectures["q"]
        assert len(shape.hidden_sizes) <= shape.layers <= 4
        assert all(3 <= width <= 40 for width in shape.hidden_sizes)
        check_tensors(member, dqn)
        seen.add(shape.residual_layers)
    group = population([member], dqn)
    group.update(batch(group.policy.agents))
    assert len(seen) > 3, "the chain is meant to visit several depths"
