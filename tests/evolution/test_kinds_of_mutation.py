"""Mutations of encoders, cells and joined parts: growth changes nothing, and what is taken away leaves all the rest."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.kinds import OBSERVATIONS, act, made, rollout_batch, shown
from helpers.support import agent, check_tensors, first_architecture, population

from evorl.config import ArchitectureLimits
from evorl.evolution import mutation as operations
from evorl.networks.parameters import MOMENTS

CRITICS = pytest.mark.parametrize("critic", ["separate", "shared"])
CELLS = pytest.mark.parametrize("cell", ["lstm", "gru"])


def trained(*overrides, observations=OBSERVATIONS["dict"], **shape):
    """An algorithm, and an agent of such a shape that has learned."""
    algorithm = made("ppo", "network.recurrent_size=12", *overrides, observations=observations)
    group = population([agent(replace(first_architecture(algorithm), **shape), dqn=algorithm)], algorithm)
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


def heads(algorithm, member):
    (stack,) = population([member], algorithm).policy.stacks
    looks = shown(algorithm.interface, 1, 32, torch.Generator().manual_seed(2))
    return {name: value.detach() for name, value in stack.networks["policy"](looks).items()}


@CRITICS
@pytest.mark.parametrize("cell", ["lstm", "gru", "null"])
@pytest.mark.parametrize("norm", [False, True])
def test_growth_preserves_what_an_agent_does_over_time(cell, critic, norm):
    algorithm, member = trained(f"network.recurrent={cell}", f"algorithm.critic={critic}", f"network.layer_norm={norm}")
    rng, networks = np.random.default_rng(3), algorithm.networks
    before = answers(algorithm, member)
    assert before.std() > 0.01
    for grow in (
        lambda: operations.enlarge(member, networks, "policy", "channels.0", 11, rng),
        lambda: operations.enlarge(member, networks, "policy", "channels.1", 20, rng),
        lambda: operations.add_layer(member, networks, "policy", "channels.0", rng),
        lambda: operations.enlarge(member, networks, "policy", "channels.0", 13, rng),
        lambda: operations.enlarge(member, networks, "policy", "hidden.1", 30, rng),
        lambda: operations.add_layer(member, networks, "policy", "hidden.1", rng),
        *([] if cell == "null" else [lambda: operations.enlarge(member, networks, "policy", "recurrent", 40, rng)]),
    ):
        grow()
        torch.testing.assert_close(answers(algorithm, member), before, rtol=1e-4, atol=1e-5)
    shape = member.architectures["policy"]
    assert shape.recurrent_size == (0 if cell == "null" else 40)


@CELLS
def test_what_has_grown_learns(cell):
    algorithm, member = trained(f"network.recurrent={cell}")
    rng, networks = np.random.default_rng(3), algorithm.networks
    operations.enlarge(member, networks, "policy", "channels.1", 12, rng)
    operations.add_layer(member, networks, "policy", "channels.0", rng)
    operations.enlarge(member, networks, "policy", "recurrent", 20, rng)
    group = population([member], algorithm)
    for seed in range(4):
        group.update(rollout_batch(algorithm, group.policy.agents, length=4, seed=seed))
    after = group.to_agents()[0].tensors["policy"]["parameters"]
    assert after["encoder.camera.0.residual.0.scale"].any(), "so is the new layer"
    assert after["hidden.0.weight.camera"][..., 8:, :].any(), "so are the new channels"
    assert after["action.weight"][12:].any(), "so are the new recurrent units"
    assert after["recurrent.weight"][:, 12:].any()


def test_moments_of_what_stays_survive_growing_and_shrinking():
    algorithm, member = trained("network.recurrent=gru")
    before = {role: dict(member.tensors["policy"][role]) for role in (*MOMENTS, "parameters")}
    rng = np.random.default_rng(0)
    for group, size in (("recurrent", 30), ("channels.1", 16)):
        small = member.architectures["policy"].sizes()[group]
        operations.enlarge(member, algorithm.networks, "policy", group, size, rng)
        operations.reduce(member, algorithm.networks, "policy", group, small)
    for role, tensors in before.items():
        for name, value in tensors.items():
            torch.testing.assert_close(member.tensors["policy"][role][name], value, rtol=0, atol=0)


@CRITICS
def test_a_long_chain_of_mutations_stays_inside_the_limits_and_consistent(critic, monkeypatch):
    monkeypatch.setattr(operations, "MAX_CONVOLUTIONS", 4)
    monkeypatch.setattr(operations, "UNIT_STEPS", (1, 9))
    monkeypatch.setattr(operations, "CHANNEL_STEPS", (1, 5))
    monkeypatch.setattr(operations, "MIN_CHANNELS", 2)
    monkeypatch.setattr(operations, "MAX_CHANNELS", 20)
    algorithm = made("ppo", "network.recurrent=lstm", f"algorithm.critic={critic}", observations=OBSERVATIONS["dict"])
    rng = np.random.default_rng(5)
    limits = ArchitectureLimits(max_layers=3, min_units=3, max_units=80)
    member, seen = agent(dqn=algorithm), set()
    for step in range(150):
        mutate = operations.mutate_layers if rng.random() < 0.4 else operations.mutate_units
        change = mutate(member, algorithm.networks, limits, rng)
        layers = change.target.endswith(".residual_layers")
        seen.add(change.target.split(".")[0] + (" layer" if layers else ""))
        shape = member.architectures["policy"]
        assert 1 <= shape.layers <= 3
        assert 2 <= len(shape.convolutions) + sum(layer.residual_layers for layer in shape.convolutions) <= 4
        assert all(3 <= width <= 80 for width in (*shape.hidden_sizes, shape.recurrent_size))
        assert all(2 <= layer.channels <= 20 for layer in shape.convolutions)
        check_tensors(member, algorithm)
        if step % 30 == 0:
            group = population([member], algorithm)
            group.update(rollout_batch(algorithm, group.policy.agents, length=4, seed=step))
            assert all(
                value.isfinite().all() for value in group.to_agents()[0].tensors["policy"]["parameters"].values()
            )
    assert {"hidden", "channels", "recurrent", "hidden layer", "channels layer"} <= seen


def test_a_layer_norm_counts_all_units_that_are_left():
    algorithm, member = trained("network.layer_norm=true")
    counted = "hidden.1.active_units"
    operations.enlarge(member, algorithm.networks, "policy", "hidden.1", 20, np.random.default_rng(0))
    assert member.tensors["policy"]["buffers"][counted].sum(-1).unique() == 12, "what has grown does not count yet"
    member.tensors["policy"]["parameters"]["action.weight"][12:] = 5.0
    operations.reduce(member, algorithm.networks, "policy", "hidden.1", 15)
    buffers = member.tensors["policy"]["buffers"]
    assert buffers[counted].shape[-1] == 15
    assert (buffers[counted] == 1).all()
    assert (buffers["hidden.0.active_units"] == 1).all()


@CRITICS
@CELLS
def test_units_that_nothing_reads_go_first_from_a_cell_and_an_encoder(cell, critic):
    algorithm, member = trained(f"network.recurrent={cell}", f"algorithm.critic={critic}")
    tensors = member.tensors["policy"]["parameters"]
    for head in ("action", "value"):
        tensors[f"{head}.weight"][[2, 9]] = 0
    tensors["recurrent.weight"][..., [2, 9], :, :] = 0
    # Copies, places, channels, units.
    tensors["hidden.0.weight.camera"][..., [1, 4], :] = 0
    before = answers(algorithm, member)
    operations.reduce(member, algorithm.networks, "policy", "recurrent", 10)
    operations.reduce(member, algorithm.networks, "policy", "channels.1", 6)
    torch.testing.assert_close(answers(algorithm, member), before)
    operations.reduce(member, algorithm.networks, "policy", "recurrent", 9)
    assert not torch.allclose(answers(algorithm, member), before)
