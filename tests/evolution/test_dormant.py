"""Resets of dormant units: which units they find, what becomes of them, and that nothing else changes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.kinds import OBSERVATIONS, act, made, rollout_batch, shown
from helpers.support import agent, algorithm, batch, check_tensors, config, first_architecture, population, seen

from evorl.evolution import MUTATIONS, Context
from evorl.evolution.mutation import enlarge
from evorl.networks.parameters import activity
from evorl.types import Architecture

SHAPE = Architecture((20, 24), (1, 0), "relu")


def trained(algorithm, shape, updates=3):
    """An agent of this shape that has learned, with second moments that show no dormant unit."""
    group = population([agent(shape, dqn=algorithm)], algorithm)
    rollouts = algorithm.config.algorithm.name == "ppo"
    for seed in range(updates):
        given = rollout_batch(algorithm, group.policy.agents, length=4, seed=seed) if rollouts else None
        group.update(given or batch(group.policy.agents, seed=seed))
    member, generator = group.to_agents()[0], torch.Generator().manual_seed(5)
    for roles in member.tensors.values():
        for value in roles["square"].values():
            value.uniform_(0.5e-6, 2e-6, generator=generator)
    return member


def specs_of(algorithm, member, network):
    return algorithm.networks[network].network.specs(member.architectures[network])


def places(spec, name, group, unit, branch, reading):
    """The places in a parameter at which a unit of a branch is read, or produced."""
    index = [slice(None)] * len(spec.axes)
    ends = spec.reads if reading else spec.produces
    first = len(spec.axes) - len(spec.produces) - (len(spec.reads) if reading else 0)
    if group not in ends or (branch is not None and spec.branch not in (None, branch)):
        return None
    index[first + ends.index(group)] = unit
    if spec.branches and branch is not None:
        index[0] = branch
    return tuple(index)


def silence(algorithm, member, network, group, unit, branch=None):
    """Let a unit output zero and have no gradients."""
    for name, spec in specs_of(algorithm, member, network).items():
        if spec.trained and (at := places(spec, name, group, unit, branch, False)):
            for role in member.tensors[network].keys() - {"buffers"}:
                member.tensors[network][role][name][at] = 0


def reset(algorithm, member, threshold=0.025, seed=0):
    settings = algorithm.config.evolution
    mutation = settings.mutation.model_copy(update={"dormant_threshold": threshold})
    context = Context(settings.model_copy(update={"mutation": mutation}), algorithm.networks)
    return MUTATIONS["dormant"](member, context, np.random.default_rng(seed))


def check(algorithm, before, after, network, units):
    """Check that these units (group, unit, branch) are as new, and that nothing else has changed."""
    check_tensors(after, algorithm)
    for name, spec in specs_of(algorithm, before, network).items():
        if not spec.trained:
            assert torch.equal(before.tensors[network]["buffers"][name], after.tensors[network]["buffers"][name])
            continue
        old, new = (
            {role: tensors[name] for role, tensors in each.tensors[network].items() if role != "buffers"}
            for each in (before, after)
        )
        read, produced = (torch.zeros_like(old["mean"], dtype=torch.bool) for _ in range(2))
        for group, unit, branch in units:
            for found, reading in ((read, True), (produced, False)):
                if at := places(spec, name, group, unit, branch, reading):
                    found[at] = True
        for role in old:
            assert torch.equal(old[role][~(read | produced)], new[role][~(read | produced)]), (name, role)
        for role in old.keys() - {"mean", "square"}:
            assert torch.equal(new["parameters"][produced], new[role][produced]), name
            if len({group for group, *_ in units}) == 1:
                assert not new[role][read].any(), name
        drawn = new["parameters"][produced & ~read]
        assert bool(drawn.any()) == (spec.fill not in ("zeros", (0.0, 0.0, 0.0)) and bool(produced.any())), name
        assert not new["mean"][read | produced].any(), name
        assert new["square"][read | produced].all(), name


def q_values(member, dqn):
    stack = population([member], dqn).policy.stacks[0]
    observation = torch.randn(1, 50, 5, generator=torch.Generator().manual_seed(1))
    return [dqn.q_values(network["q"](seen(observation))) for network in (stack.networks, stack.target_networks)]


@pytest.mark.parametrize("dormant", [(3, 7), (0,), (23,)])
def test_exactly_the_dormant_units_are_reset_and_silent_ones_change_nothing(dormant):
    dqn = algorithm()
    member = trained(dqn, SHAPE)
    for unit in dormant:
        silence(dqn, member, "q", "hidden.1", unit)
    before = member.child(0)
    record = reset(dqn, member)
    assert (record.target, record.before, record.after) == ("units reset in hidden.1", None, len(dormant))
    check(dqn, before, member, "q", [("hidden.1", unit, None) for unit in dormant])
    weight = member.tensors["q"]["parameters"]["hidden.1.weight"][:, list(dormant)]
    assert weight.abs().max() <= 1 / np.sqrt(20)
    assert weight.std() == pytest.approx(1 / np.sqrt(3 * 20), rel=0.3)
    kept = [unit for unit in range(24) if unit not in dormant]
    square = before.tensors["q"]["square"]["hidden.1.weight"][:, kept].mean()
    found = member.tensors["q"]["square"]["hidden.1.weight"][:, list(dormant)]
    torch.testing.assert_close(found, square.expand_as(found))
    for was, now in zip(q_values(before, dqn), q_values(member, dqn), strict=True):
        torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-6)


def test_dormant_units_of_several_layers_are_found_before_the_first_reset():
    dqn = algorithm()
    member = trained(dqn, SHAPE)
    units = [("hidden.0", 4, None), *(("hidden.1", unit, None) for unit in (0, 1, 2))]
    for group, unit, _ in units:
        silence(dqn, member, "q", group, unit)
    before = member.child(0)
    record = reset(dqn, member)
    assert str(record) == "dormant (units reset in hidden.0, hidden.1: 4)"
    check(dqn, before, member, "q", units)
    for was, now in zip(q_values(before, dqn), q_values(member, dqn), strict=True):
        torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("noisy", "layer_norm"), [*itertools.product((False, True), (False, True))])
def test_a_unit_is_reset_in_its_own_stream_only(noisy, layer_norm):
    dqn = algorithm("algorithm.dueling=true", *(["algorithm.noisy={}"] if noisy else []))
    member = trained(dqn, replace(SHAPE, branches="last", layer_norm=layer_norm))
    units = [("hidden.1", 5, 1), ("hidden.1", 6, 0), ("hidden.1", 9, 0), ("hidden.1", 9, 1)]
    for group, unit, branch in units:
        silence(dqn, member, "q", group, unit, branch)
    before = member.child(0)
    assert reset(dqn, member).after == 4
    check(dqn, before, member, "q", units)
    for head, unread in (("advantage", {6, 9}), ("value", {5, 9})):
        for name in (f"{head}.weight", *([f"sigma.{head}.weight"] if noisy else [])):
            assert {unit for unit in range(24) if not member.tensors["q"]["parameters"][name][unit].any()} == unread
    if not layer_norm:
        for was, now in zip(q_values(before, dqn), q_values(member, dqn), strict=True):
            torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-6)


def answers(ppo, member):
    """Values and log-probabilities over a few steps, with an episode's start among them."""
    group, generator = population([member], ppo), torch.Generator().manual_seed(3)
    state, found = group.policy.initial_state(4), []
    for _ in range(4):
        look = shown(ppo.interface, 1, 4, generator)
        found.append(group.policy.value(look, state))
        output, state = act(group, look, state)
        found.append(output.extras["log_prob"])
    return torch.stack(found)


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize(
    ("cell", "group"),
    [("null", "channels.0"), ("null", "channels.1"), ("lstm", "recurrent"), ("gru", "recurrent")],
)
def test_channels_and_recurrent_units_are_reset_too(cell, critic, group):
    ppo = made("ppo", f"network.recurrent={cell}", f"algorithm.critic={critic}", observations=OBSERVATIONS["dict"])
    shape = first_architecture(ppo)
    convolutions = tuple(replace(layer, residual_layers=1) for layer in shape.convolutions)
    member = trained(ppo, replace(shape, convolutions=convolutions))
    branch = 1 if critic == "separate" and group == "recurrent" else None
    silence(ppo, member, "policy", group, 2, branch)
    before = member.child(0)
    assert str(reset(ppo, member)) == f"dormant (units reset in {group}: 1)"
    check(ppo, before, member, "policy", [(group, 2, branch)])
    torch.testing.assert_close(answers(ppo, member), answers(ppo, before), rtol=1e-4, atol=1e-5)


def test_activity_is_the_root_mean_square_gradient_relative_to_the_mean():
    dqn = algorithm("algorithm.dueling=true")
    member = trained(dqn, replace(SHAPE, branches="last"))
    square, specs = member.tensors["q"]["square"], specs_of(dqn, member, "q")
    for group, width in (("hidden.0", 20), ("hidden.1", 24)):
        branches = 2 if group == "hidden.1" else 1
        expected = np.zeros((branches, width))
        for branch, unit in itertools.product(range(branches), range(width)):
            incoming = [
                value.reshape(branches, -1, width)[branch, :, unit]
                for name, value in square.items()
                if name.startswith(f"{group}.") and "weight" in name
            ]
            expected[branch, unit] = np.sqrt(np.mean([float(value) for one in incoming for value in one]))
        expected /= expected.mean(1, keepdims=True)
        np.testing.assert_allclose(activity(specs, square, group).numpy(), expected, rtol=1e-5)
    assert activity(specs, square, "kernel.0") is None


def test_the_threshold_says_how_little_a_dormant_unit_may_learn():
    dqn, found = algorithm(), []
    for threshold in (0.0, 0.05, 0.2):
        member = trained(dqn, SHAPE)
        for unit, share in ((3, 0.1), (8, 0.01), (11, 0.0)):
            member.tensors["q"]["square"]["hidden.1.weight"][:, unit] *= share**2
        found.append(reset(dqn, member, threshold).after)
    assert found == [1, 2, 3]


def test_a_unit_whose_gradients_cease_is_found_after_7400_updates():
    """Second moments decay by 0.999 in each update."""
    dqn = algorithm()
    for updates, dormant in ((7_300, False), (7_500, True)):
        member = trained(dqn, SHAPE)
        square = member.tensors["q"]["square"]
        square["hidden.1.weight"].fill_(1.0)
        square["hidden.1.weight"][:, 5] = 0.999**updates
        # The silent unit itself lowers the mean of its layer a little.
        assert (reset(dqn, member, config().evolution.mutation.dormant_threshold) is not None) == dormant


def test_units_that_were_reset_learn_and_are_not_reset_again():
    dqn = algorithm()
    member = trained(dqn, SHAPE)
    for unit in range(8):
        silence(dqn, member, "q", "hidden.1", unit)
    assert reset(dqn, member).after == 8
    assert reset(dqn, member.child(1)) is None
    born = {name: value.clone() for name, value in member.tensors["q"]["parameters"].items()}
    group = population([member, agent(SHAPE, dqn=dqn)], dqn)
    for seed in range(3):
        group.update(batch(group.policy.agents, seed=seed))
    after = group.to_agents()[0].tensors["q"]["parameters"]
    assert (after["q_values.weight"][:8] != 0).all(1).sum() >= 4, "some ReLUs may be off for all of the batches"
    assert (after["hidden.1.weight"][:, :8] != born["hidden.1.weight"][:, :8]).any()


def test_layer_norm_statistics_never_run_out_of_units():
    dqn = algorithm()
    member = trained(dqn, replace(SHAPE, layer_norm=True))
    enlarge(member, dqn.networks, "q", "hidden.1", 30, np.random.default_rng(0))
    for unit in range(30):
        silence(dqn, member, "q", "hidden.1", unit)
        assert reset(dqn, member, seed=unit).after == 1
    counted = member.tensors["q"]["buffers"]["hidden.1.active_units"].flatten()
    assert counted[:24].all(), "those that counted still do"
    assert not counted[24:].any()
    assert all(value.isfinite().all() for value in q_values(member, dqn))
