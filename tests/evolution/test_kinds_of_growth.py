"""Mutations of image encoders and of recurrent cells: growth changes nothing, and nothing that was learned is lost."""

import numpy as np
import pytest
import torch
from helpers.kinds import OBSERVATIONS, act, made, rollout_batch, shown
from helpers.support import agent, population

from evorl.config import ArchitectureLimits
from evorl.evolution import architecture as operations
from evorl.networks.growth import MOMENTS

KINDS = [
    (cell, critic, norm)
    for cell in ("lstm", "gru", "null")
    for critic in ("separate", "shared")
    for norm in (False, True)
]


def trained(*overrides, observations=OBSERVATIONS["dict"]):
    algorithm = made("ppo", "network.recurrent_size=12", *overrides, observations=observations)
    group = population([agent(dqn=algorithm)], algorithm)
    for seed in range(3):
        group.update(rollout_batch(algorithm, group.policy.agents, length=4, seed=seed))
    return algorithm, group.to_agents()[0]


def answers(algorithm, member, steps=5):
    """Values and action heads over a few steps, with an episode's start among them."""
    group, generator = population([member], algorithm), torch.Generator().manual_seed(3)
    state, found = group.policy.initial_state(4), []
    for _ in range(steps):
        seen = shown(algorithm.interface, 1, 4, generator)
        found.append(group.policy.value(seen, state))
        output, state = act(group, seen, state)
        found.append(output.extras["log_prob"])
    return torch.stack(found)


@pytest.mark.parametrize(("cell", "critic", "norm"), KINDS)
def test_growth_preserves_what_an_agent_does_over_time(cell, critic, norm):
    algorithm, member = trained(f"network.recurrent={cell}", f"algorithm.critic={critic}", f"network.layer_norm={norm}")
    rng, networks = np.random.default_rng(3), algorithm.networks
    before = answers(algorithm, member)
    assert before.std() > 0.01
    for grow in (
        lambda: operations.enlarge(member, networks, "policy", "channels.0", 11, rng),
        lambda: operations.enlarge(member, networks, "policy", "channels.1", 20, rng),
        lambda: operations.enlarge(member, networks, "policy", "kernel.0", 5, rng),
        lambda: operations.enlarge(member, networks, "policy", "kernel.1", 4, rng),
        lambda: operations.add_layer(member, networks, "policy", "channels.0", rng),
        lambda: operations.enlarge(member, networks, "policy", "channels.0", 13, rng),
        lambda: operations.enlarge(member, networks, "policy", "hidden.1", 30, rng),
        lambda: operations.add_layer(member, networks, "policy", "hidden.1", rng),
        *([] if cell == "null" else [lambda: operations.enlarge(member, networks, "policy", "recurrent", 40, rng)]),
    ):
        grow()
        torch.testing.assert_close(answers(algorithm, member), before, rtol=1e-4, atol=1e-5)
    shape = member.architectures["policy"]
    assert [(layer.kernel, layer.padding) for layer in shape.convolutions] == [(5, 1), (4, 1)]
    assert shape.recurrent_size == (0 if cell == "null" else 40)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_what_has_grown_learns(cell):
    algorithm, member = trained(f"network.recurrent={cell}")
    rng, networks = np.random.default_rng(3), algorithm.networks
    operations.enlarge(member, networks, "policy", "channels.1", 12, rng)
    operations.enlarge(member, networks, "policy", "kernel.0", 5, rng)
    operations.add_layer(member, networks, "policy", "channels.0", rng)
    operations.enlarge(member, networks, "policy", "recurrent", 20, rng)
    group = population([member], algorithm)
    for seed in range(4):
        group.update(rollout_batch(algorithm, group.policy.agents, length=4, seed=seed))
    after = group.to_agents()[0].tensors["policy"]["parameters"]
    assert after["encoder.camera.0.weight"][:, 4].any(), "the kernel's new row is read"
    assert after["encoder.camera.0.residual.0.scale"].any(), "so is the new layer"
    assert after["hidden.0.weight.camera"][:, 8:].any(), "so are the new channels"
    assert after["action.weight"][12:].any(), "so are the new recurrent units"
    assert after["recurrent.weight"][:, 12:].any()


def test_moments_of_what_stays_survive_growing_and_shrinking():
    algorithm, member = trained("network.recurrent=gru")
    before = {role: dict(member.tensors["policy"][role]) for role in (*MOMENTS, "parameters")}
    rng = np.random.default_rng(0)
    for group, size in (("recurrent", 30), ("kernel.0", 6), ("channels.1", 16)):
        small = member.architectures["policy"].sizes()[group]
        operations.enlarge(member, algorithm.networks, "policy", group, size, rng)
        operations.reduce(member, algorithm.networks, "policy", group, small)
    for role, tensors in before.items():
        for name, value in tensors.items():
            torch.testing.assert_close(member.tensors["policy"][role][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_merging_layers_of_joined_parts_multiplies_them(critic):
    """Where the activation between two layers changes nothing, neither does the merge."""
    algorithm, member = trained(
        "network.activation=relu", f"algorithm.critic={critic}", observations=OBSERVATIONS["tuple"]
    )
    for role in ("parameters",):
        member.tensors["policy"][role]["hidden.0.bias"] += 100.0  # Far from zero ReLU is the identity.
    before = answers(algorithm, member)
    operations.merge_layer(member, algorithm.networks, "policy", 0)
    assert member.architectures["policy"].hidden_sizes == (12,)
    torch.testing.assert_close(answers(algorithm, member), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_long_chain_of_mutations_stays_inside_the_limits_and_consistent(critic):
    algorithm = made("ppo", "network.recurrent=lstm", f"algorithm.critic={critic}", observations=OBSERVATIONS["dict"])
    spec, rng = algorithm.networks["policy"], np.random.default_rng(5)
    limits = ArchitectureLimits(
        max_layers=3, max_convolutions=4, min_units=3, max_units=80, unit_steps=(1, 9), min_channels=2, max_channels=20,
        channel_steps=(1, 5), max_kernel=6,
    )  # fmt: skip
    member, seen = agent(dqn=algorithm), set()
    for step in range(150):
        mutate = operations.mutate_layers if rng.random() < 0.4 else operations.mutate_units
        change = mutate(member, algorithm.networks, limits, rng)
        seen.add(change.split(".")[0].split(":")[0] + (" layer" if "layer" in change else ""))
        shape = member.architectures["policy"]
        assert 1 <= shape.layers <= 3
        assert 2 <= len(shape.convolutions) + sum(layer.residual_layers for layer in shape.convolutions) <= 4
        assert all(3 <= width <= 80 for width in (*shape.hidden_sizes, shape.recurrent_size))
        assert all(2 <= layer.channels <= 20 and 1 <= layer.kernel <= 6 for layer in shape.convolutions)
        specs = spec.network.specs(shape)
        for role, named in member.tensors["policy"].items():
            assert {name: tuple(value.shape) for name, value in named.items()} == {
                name: spec.shape(shape.sizes()) for name, spec in specs.items() if spec.trained == (role != "buffers")
            }
        if step % 30 == 0:
            group = population([member], algorithm)
            group.update(rollout_batch(algorithm, group.policy.agents, length=4, seed=step))
            assert all(
                value.isfinite().all() for value in group.to_agents()[0].tensors["policy"]["parameters"].values()
            )
    assert {"hidden", "channels", "kernel", "recurrent", "hidden layer", "channels layer"} <= seen
