"""How networks begin, and Adam's epsilon: each algorithm's own, against the definition and torch's Adam."""

import math

import numpy as np
import pytest
import torch
from helpers.kinds import OBSERVATIONS, made, rollout_batch
from helpers.support import agent, algorithm, batch, config, population

from evorl.config.actor_critic import A2CSettings
from evorl.config.algorithms import SETTINGS
from evorl.evolution import mutation as operations
from evorl.networks.stack import new_tensors
from evorl.types.agents import Agent

GAINS = {"encoder": math.sqrt(2), "hidden": math.sqrt(2), "recurrent": 1.0, "action": 0.01, "value": 1.0}


def newborn(algorithm, seed=0):
    """An agent's first parameters and their descriptions."""
    ((name, spec),) = algorithm.networks.items()
    member = Agent(0, {name: spec.architecture}, {})
    new_tensors(algorithm.networks, member, torch.Generator().manual_seed(seed))
    return member, member.tensors[name]["parameters"], spec.network.specs(spec.architecture)


def matrices(values, specs, sizes):
    """Each weight's copies, as matrices from what is read to what is produced."""
    for name, value in values.items():
        if "weight" in name or name == "recurrent.input":
            yield name, value.view(specs[name].matrix(sizes))


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "null"])
@pytest.mark.parametrize("name", ["a2c", "ppo"])
def test_actor_critics_begin_orthogonal(name, cell, critic):
    """The products of all rows, or of all columns where those are fewer, are those of an orthonormal base."""
    overrides = f"network.recurrent={cell}", "network.recurrent_size=12", f"algorithm.critic={critic}"
    member, values, specs = newborn(made(name, *overrides, observations=OBSERVATIONS["dict"]))
    count = 0
    for key, copies in matrices(values, specs, member.architectures["policy"].sizes()):
        for matrix in copies:
            rows = matrix if matrix.shape[0] < matrix.shape[1] else matrix.T
            expected = GAINS[key.split(".")[0]] ** 2 * torch.eye(len(rows))
            torch.testing.assert_close(rows @ rows.T, expected, rtol=1e-4, atol=1e-6)
            count += 1
        assert len(copies) == 1 or not torch.equal(copies[0], copies[1]), "branches are drawn apart"
    assert count >= 8
    assert not any(value.any() for key, value in values.items() if key.endswith("bias") and key != "recurrent.bias")


def test_dqn_begins_uniform_unless_told():
    member, values, specs = newborn(algorithm())
    for _, (matrix,) in matrices(values, specs, member.architectures["q"].sizes()):
        bound = 1 / math.sqrt(matrix.shape[0])
        assert 0.8 * bound < matrix.abs().max() <= bound
    _, values, _ = newborn(algorithm("network.initialisation=orthogonal"))
    torch.testing.assert_close(values["hidden.1.weight"] @ values["hidden.1.weight"].T, 2 * torch.eye(16))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_resolved_configuration_says_how_networks_begin(name):
    expected = "orthogonal" if issubclass(SETTINGS[name], A2CSettings) else "uniform"
    assert config(f"algorithm={{name: {name}}}").network.initialisation == expected
    assert config(f"algorithm={{name: {name}}}", "network.initialisation=uniform").network.initialisation == "uniform"
    module = config(f"algorithm={{name: {name}}}", "network={name: module, factory: 'helpers.support:probe_network'}")
    assert module.network.initialisation is None, "a user's module initialises itself"


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_an_lstm_begins_by_keeping_its_state(critic):
    """Also the units that it gets later; all other gates' biases are zero, as are a GRU's."""
    lstm = made("ppo", "network.recurrent=lstm", "network.recurrent_size=12", f"algorithm.critic={critic}")
    member, values, _ = newborn(lstm)
    expected = torch.tensor([0.0, 1.0, 0.0, 0.0]).unsqueeze(-1)
    torch.testing.assert_close(values["recurrent.bias"], expected.expand(values["recurrent.bias"].shape))
    operations.enlarge(member, lstm.networks, "policy", "recurrent", 20, np.random.default_rng(0))
    grown = member.tensors["policy"]["parameters"]["recurrent.bias"]
    assert grown.shape[-1] == 20
    torch.testing.assert_close(grown, expected.expand(grown.shape))
    _, values, _ = newborn(made("ppo", "network.recurrent=gru"))
    assert not values["recurrent.bias"].any()


def test_new_units_read_as_strongly_as_the_first_and_are_not_read_yet():
    ppo = made("ppo", observations=OBSERVATIONS["dict"])
    member, _, specs = newborn(ppo)
    for group, size in (("hidden.0", 40), ("channels.0", 14)):
        operations.enlarge(member, ppo.networks, "policy", group, size, np.random.default_rng(0))
    values, sizes = member.tensors["policy"]["parameters"], member.architectures["policy"].sizes()
    specs = ppo.networks["policy"].network.specs(member.architectures["policy"])
    for name, old in (("hidden.0.weight.camera", 16), ("encoder.camera.0.weight", 6)):
        for matrix in values[name].view(specs[name].matrix(sizes)):
            norms = matrix.norm(dim=0)
            assert norms[old:].mean().item() == pytest.approx(norms[:old].mean().item(), rel=0.35)
    assert not values["hidden.1.weight"][:, 16:].any()
    assert not values["encoder.camera.1.weight"][6:].any()


@pytest.mark.parametrize(("name", "epsilon"), [("dqn", 1e-8), ("a2c", 1e-5), ("ppo", 1e-5), ("ppo", 1e-2)])
def test_adams_epsilon_reaches_the_update(name, epsilon):
    own = [f"algorithm.adam_epsilon={epsilon}"] if epsilon > 1e-3 else []
    given = made(name, "algorithm.max_grad_norm=1.0", *own)
    # Gradients so small that epsilon counts beside them.
    member = agent(dqn=given, max_grad_norm=1e-5)
    group = population([member], given)
    (stack,) = group.policy.stacks
    ((key, module),) = stack.networks.items()
    some = batch(group.policy.agents) if name == "dqn" else rollout_batch(given, group.policy.agents)
    learner = group.stacks[0].networks[key]
    learner.loss(given.objectives[0], stack, some, torch.Generator())
    gradient = learner.gradient.clone()
    gradient *= min(1.0, 1e-5 / float(gradient.norm()))
    reference = module.parameters.flat.clone().requires_grad_()
    reference.grad = gradient
    torch.optim.Adam([reference], lr=member.hyperparameters["learning_rate"], eps=epsilon).step()
    before = module.parameters.flat.clone()
    group.update(some)
    torch.testing.assert_close(module.parameters.flat - before, reference.detach() - before, rtol=1e-2, atol=1e-7)
