"""Stacks of every kind of network compute what each of their agents computes alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.kinds import ACTIONS, OBSERVATIONS, made, rollout_batch, shown
from helpers.support import agent, check_stacks_equal_singles, first_architecture

from evorl.evolution.mutation import add_layer, enlarge, reduce
from evorl.networks.recurrent import CELLS, unroll

CASES = {
    **{f"seen: {name}": ((), {"observations": space}) for name, space in OBSERVATIONS.items()},
    **{f"done: {name}": ((), {"actions": space}) for name, space in ACTIONS.items()},
    "masked": ((), {"masked": True}),
    "masked choices": ((), {"masked": True, "actions": ACTIONS["choices"]}),
    "a shared critic": (("algorithm.critic=shared",), {"observations": OBSERVATIONS["dict"]}),
    "a layer norm": (("network.layer_norm=true",), {}),
    "squashed": (("algorithm.distribution=squashed",), {"actions": ACTIONS["continuous"]}),
    "normalised": (("algorithm.normalize_observations=true",), {"observations": OBSERVATIONS["dict"]}),
    "lstm": (("network.recurrent=lstm", "network.recurrent_size=12"), {}),
    "gru": (("network.recurrent=gru", "network.recurrent_size=12"), {}),
    "lstm, a shared critic": (("network.recurrent=lstm", "algorithm.critic=shared"), {}),
    "gru on images": (("network.recurrent=gru", "network.recurrent_size=12"), {"observations": OBSERVATIONS["dict"]}),
}


def family(algorithm):
    """Agents of one population after some mutations, with numbers of their own."""
    rng, members = np.random.default_rng(0), []
    for index in range(4):
        member = agent(replace(first_architecture(algorithm), activation="gelu"), id=index, dqn=algorithm)
        member.hyperparameters |= {"learning_rate": 1e-3 * (index + 1), "entropy_coefficient": 0.01 * index}
        if "clip" in member.hyperparameters:
            member.hyperparameters["clip"] = 0.1 * (index + 1)
        members.append(member)
    groups = members[0].architectures["policy"].sizes()
    enlarge(members[1], algorithm.networks, "policy", "hidden.0", 40, rng)
    add_layer(members[2], algorithm.networks, "policy", "hidden.1", rng)
    if "recurrent" in groups:
        enlarge(members[1], algorithm.networks, "policy", "recurrent", 70, rng)
    if "channels.0" in groups:
        enlarge(members[1], algorithm.networks, "policy", "channels.1", 13, rng)
        add_layer(members[2], algorithm.networks, "policy", "channels.0", rng)
        reduce(members[3], algorithm.networks, "policy", "channels.0", groups["channels.0"] - 1)
    for member in members:
        generator = torch.Generator().manual_seed(member.id)
        for name, value in member.tensors["policy"]["parameters"].items():
            if name.endswith(("scale", "bias")):
                value += 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in member.tensors["policy"]["buffers"].items():
            if name.startswith("normal."):
                value += torch.rand(value.shape, generator=generator)
    return members


@pytest.mark.parametrize("case", CASES)
def test_stacks_act_learn_and_unroll_as_their_agents_do_alone(case):
    overrides, spaces = CASES[case]
    algorithm = made("ppo", "algorithm.normalize_advantage=true", *overrides, **spaces)
    agents = family(algorithm)
    length = 4 if agents[0].architectures["policy"].recurrent else 1
    look = shown(algorithm.interface, len(agents), 6, torch.Generator().manual_seed(9))
    recurrent = rollout_batch(algorithm, agents, size=6, length=length).recurrent
    batches = [rollout_batch(algorithm, agents, length=length, seed=seed) for seed in range(3)]
    state = None if recurrent is None else recurrent.state
    check_stacks_equal_singles(agents, algorithm, batches, look, state, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CELLS)
def test_a_sequence_is_the_same_step_by_step_and_resets_where_an_episode_begins(name):
    cell, units = CELLS[name], 5
    gates = len(cell.biases)
    given, weight = torch.randn(2, 6, 3, gates * units), torch.randn(2, units, gates * units)
    first = torch.randn(2, 3, cell.slots, units)
    started = torch.zeros(2, 6, 3, dtype=torch.bool)
    started[:, 4] = True
    outputs, after = unroll(cell, given, weight, first, started)
    state, steps = first, []
    for t in range(6):
        step, state = unroll(cell, given[:, t : t + 1], weight, state, started[:, t : t + 1])
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, 1), outputs)
    torch.testing.assert_close(state, after)
    never = torch.zeros(2, 2, 3, dtype=torch.bool)
    fresh, _ = unroll(cell, given[:, 4:], weight, torch.zeros_like(first), never)
    torch.testing.assert_close(outputs[:, 4:], fresh)
    assert not torch.allclose(outputs[:, :1], unroll(cell, given[:, :1], weight, first * 0, never[:, :1])[0])
