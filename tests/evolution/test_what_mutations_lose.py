"""Mutations that take something away keep all the rest: merged layers, fewer units, fewer layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.kinds import OBSERVATIONS, act, made, rollout_batch, shown
from helpers.support import agent, first_architecture, population

from evorl.evolution import architecture as operations
from evorl.networks import layers
from evorl.networks.growth import MOMENTS

CRITICS = pytest.mark.parametrize("critic", ["separate", "shared"])


def trained(algorithm, architecture):
    group = population([agent(architecture, dqn=algorithm)], algorithm)
    for seed in range(2):
        group.update(rollout_batch(algorithm, group.policy.agents, length=4, seed=seed))
    return group.to_agents()[0]


def heads(algorithm, member):
    (stack,) = population([member], algorithm).policy.stacks
    looks = shown(algorithm.interface, 1, 32, torch.Generator().manual_seed(2))
    return {name: value.detach() for name, value in stack.networks["policy"](looks).items()}


@CRITICS
@pytest.mark.parametrize("index", [0, 1])
def test_two_layers_with_the_identity_between_them_become_their_product(index, critic, monkeypatch):
    monkeypatch.setitem(layers.IN_PLACE, "relu", lambda x: x)
    algorithm = made("ppo", f"algorithm.critic={critic}", observations=OBSERVATIONS["dict"])
    shape = replace(
        first_architecture(algorithm), hidden_sizes=(16, 12, 10), residual_layers=(index, 0, 1), activation="relu"
    )
    member = agent(shape, dqn=algorithm)
    before = heads(algorithm, member)
    operations.merge_layer(member, algorithm.networks, "policy", index)
    assert member.architectures["policy"].hidden_sizes == ((12, 10) if index == 0 else (16, 10))
    assert member.architectures["policy"].residual_layers == (index, 1)
    torch.testing.assert_close(heads(algorithm, member), before)


@CRITICS
def test_only_the_product_forgets_its_moments(critic):
    algorithm = made("ppo", f"algorithm.critic={critic}", observations=OBSERVATIONS["dict"])
    member = trained(algorithm, replace(first_architecture(algorithm), residual_layers=(1, 1)))
    before = {role: dict(member.tensors["policy"][role]) for role in MOMENTS}
    operations.merge_layer(member, algorithm.networks, "policy", 0)
    moved = {f"hidden.0.residual.0.{what}": f"hidden.1.residual.0.{what}" for what in ("weight", "bias", "scale")}
    for role in MOMENTS:
        tensors = member.tensors["policy"][role]
        product = {f"hidden.0.weight.{part}" for part in algorithm.interface.parts} | {"hidden.0.bias"}
        assert product <= tensors.keys()
        for name, value in tensors.items():
            if name in product:
                assert value.any() == (role == "square"), name
            else:
                assert value.any(), name
                assert torch.equal(value, before[role][moved.get(name, name)]), name


def test_a_layer_norm_counts_all_units_that_are_left():
    algorithm = made("ppo", "network.layer_norm=true")
    member = trained(algorithm, first_architecture(algorithm))
    counted = "hidden.1.counted"
    operations.enlarge(member, algorithm.networks, "policy", "hidden.1", 20, np.random.default_rng(0))
    assert member.tensors["policy"]["buffers"][counted].sum(-1).unique() == 12, "what has grown does not count yet"
    member.tensors["policy"]["parameters"]["action.weight"][12:] = 5.0
    operations.reduce(member, algorithm.networks, "policy", "hidden.1", 15)
    buffers = member.tensors["policy"]["buffers"]
    assert buffers[counted].shape[-1] == 15
    assert (buffers[counted] == 1).all()
    assert (buffers["hidden.0.counted"] == 1).all()


@CRITICS
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_units_that_nothing_reads_go_first_from_a_cell_and_an_encoder(cell, critic):
    algorithm = made(
        "ppo", f"network.recurrent={cell}", "network.recurrent_size=12", f"algorithm.critic={critic}",
        observations=OBSERVATIONS["dict"],
    )  # fmt: skip
    member = trained(algorithm, first_architecture(algorithm))
    for role in ("parameters",):
        tensors = member.tensors["policy"][role]
        for head in ("action", "value"):
            tensors[f"{head}.weight"][[2, 9]] = 0
        tensors["recurrent.weight"][..., [2, 9], :, :] = 0
        # Copies, channels, places, units.
        tensors["hidden.0.weight.camera"][..., [1, 4], :, :] = 0

    def answers():
        group, generator = population([member], algorithm), torch.Generator().manual_seed(3)
        state, found = group.policy.initial_state(4), []
        for _ in range(5):
            looks = shown(algorithm.interface, 1, 4, generator)
            found.append(group.policy.value(looks, state))
            output, state = act(group, looks, state)
            found.append(output.extras["log_prob"])
        return torch.stack(found)

    before = answers()
    operations.reduce(member, algorithm.networks, "policy", "recurrent", 10)
    operations.reduce(member, algorithm.networks, "policy", "channels.1", 6)
    torch.testing.assert_close(answers(), before)
    operations.reduce(member, algorithm.networks, "policy", "recurrent", 9)
    assert not torch.allclose(answers(), before)


def test_a_kernel_loses_its_last_rows_and_columns_and_regains_them_as_zeros():
    algorithm = made("ppo", observations=OBSERVATIONS["image"])
    member = trained(algorithm, first_architecture(algorithm))
    name, features = "encoder.observation.0.weight", heads(algorithm, member)
    whole = member.tensors["policy"]["parameters"][name].clone()
    operations.reduce(member, algorithm.networks, "policy", "kernel.0", 3)
    assert [(layer.kernel, layer.padding) for layer in member.architectures["policy"].convolutions] == [(3, -1), (3, 0)]
    smaller = heads(algorithm, member)
    operations.enlarge(member, algorithm.networks, "policy", "kernel.0", 4, np.random.default_rng(0))
    whole[:, 3], whole[:, :, 3] = 0, 0
    assert torch.equal(member.tensors["policy"]["parameters"][name], whole)
    torch.testing.assert_close(heads(algorithm, member), smaller)
    assert not torch.allclose(features["value"], smaller["value"])
