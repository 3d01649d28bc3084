"""An agent of three networks, SAC's: an actor, twin critics that read its action, and a temperature without inputs."""

import copy
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import support
from helpers.replayed import family, replayed_batch
from helpers.support import agent, config, population

from evorl.config import ArchitectureLimits
from evorl.evolution import mutation as operations
from evorl.evolution.mutation import MUTATIONS, Context
from evorl.population import check_agents
from evorl.replay.statistics import Moments
from evorl.runs.output.metrics import record_of
from evorl.system.formats import decode_agents, encode_agents
from evorl.tracking.wandb import cell
from evorl.types.agents import Architecture
from evorl.types.outcomes import UserError

ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,))


@pytest.fixture
def algorithm():
    return support.algorithm("algorithm={name: sac}", actions=ACTIONS)


def outputs(member, algorithm):
    """What all of an agent's networks and target copies put out."""
    (stack,) = population([member], algorithm).policy.stacks
    generator = torch.Generator().manual_seed(0)
    look = {name: torch.randn(1, 9, size, generator=generator) for name, size in (("observation", 5), ("action", 2))}
    networks = [*stack.networks.values(), *stack.target_networks.values()]
    return [value for network in networks for value in network(look).values()]


@pytest.mark.parametrize("name", ["actor", "critics"])
def test_growth_of_one_network_keeps_what_all_compute(algorithm, name):
    learner, rng = population(family(algorithm), algorithm), np.random.default_rng(0)
    learner.update(replayed_batch(algorithm, 4))
    for member in learner.to_agents():
        before, others = outputs(member, algorithm), copy.deepcopy({**member.tensors, name: None})
        change = operations.enlarge(member, algorithm.networks, name, "hidden.0", 50, rng)
        operations.add_layer(member, algorithm.networks, name, "hidden.1", rng)
        assert (change.target, change.after) == (f"{name}.hidden.0", 50)
        torch.testing.assert_close(outputs(member, algorithm), before, rtol=1e-4, atol=1e-5)
        assert [other for other in algorithm.networks if member.architectures[other].sizes().get("hidden.0") == 50] == [
            name
        ]
        torch.testing.assert_close({**member.tensors, name: None}, others, rtol=0, atol=0)


def test_a_long_chain_of_mutations_changes_one_network_at_a_time_and_never_the_temperature(algorithm, monkeypatch):
    monkeypatch.setattr(operations, "UNIT_STEPS", (1, 9))
    limits = ArchitectureLimits(max_layers=4, min_units=3, max_units=40)
    member, rng, changed = agent(dqn=algorithm), np.random.default_rng(5), []
    for _ in range(120):
        before = dict(member.architectures)
        mutate = operations.mutate_layers if rng.random() < 0.5 else operations.mutate_units
        change = mutate(member, algorithm.networks, limits, rng)
        (name,) = [name for name in before if member.architectures[name] != before[name]]
        assert change.target.startswith(f"{name}.hidden.")
        changed.append(name)
        assert all(1 <= member.architectures[other].layers <= 4 for other in ("actor", "critics"))
        check_agents([member], algorithm, "here")
    assert 30 < changed.count("actor") < 90
    assert changed.count("actor") + changed.count("critics") == 120
    learner = population([member], algorithm)
    learner.update(replayed_batch(algorithm, 1))
    assert learner.to_agents()[0].fault is None


def test_noise_is_the_same_for_an_agent_that_comes_from_a_file(algorithm):
    context = Context(config().evolution, algorithm.networks)
    member = agent(dqn=algorithm)
    results = []
    for each in (member, *decode_agents(encode_agents([member]), "here")):
        (child,) = population([each], algorithm).to_agents()
        MUTATIONS["parameters"](child, context, np.random.default_rng(0))
        results.append(child.tensors)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    for name in algorithm.networks:
        assert not torch.equal(*(flat(tensors[name]["parameters"]) for tensors in (member.tensors, results[0])))


def flat(tensors):
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_agents_survive_their_file(algorithm):
    agents = family(algorithm)
    found = decode_agents(encode_agents(agents), "here")
    check_agents(found, algorithm, "here")
    assert [member.describe() for member in found] == [member.describe() for member in agents]
    torch.testing.assert_close(*([each.tensors for each in members] for members in (found, agents)), rtol=0, atol=0)


WRONG = {
    "has the networks": lambda member: member.architectures.pop("actor"),
    "temperature differs from the configuration": lambda member: member.architectures.update(
        temperature=Architecture((4,), (0,))
    ),
    "critics differs from the configuration": lambda member: member.architectures.update(
        critics=replace(member.architectures["critics"], branches="shared")
    ),
    "parameters of actor": lambda member: member.architectures.update(
        actor=replace(member.architectures["actor"], hidden_sizes=(16, 17))
    ),
}


@pytest.mark.parametrize("problem", WRONG)
def test_agents_of_other_networks_are_refused(algorithm, problem):
    member = agent(dqn=algorithm)
    WRONG[problem](member)
    with pytest.raises(UserError, match=problem):
        check_agents([member], algorithm, "here")


def test_agents_share_a_stack_where_all_their_networks_are_of_one_kind(algorithm, monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", 10**9)
    agents = family(algorithm)
    for member in agents[1:3]:
        member.architectures["critics"] = replace(member.architectures["critics"], activation="tanh")
    policy = population(agents, algorithm).policy
    assert sorted(sorted(policy.places(stack)) for stack in policy.stacks) == [[0, 3], [1, 2]]
    for stack in policy.stacks:
        for name, network in stack.networks.items():
            shapes = [policy.agents[place].architectures[name] for place in policy.places(stack)]
            assert {shape.activation for shape in shapes} == {network.layout.architecture.activation}
            assert all(shape.hidden_sizes <= network.layout.architecture.hidden_sizes for shape in shapes)
    spec = algorithm.networks["temperature"]
    assert spec.network.cost(spec.architecture) <= 1
    assert spec.network.recurrent_shape(spec.architecture) == (0, 0)


def test_only_networks_that_normalise_a_part_take_its_statistics():
    algorithm = support.algorithm("algorithm={name: sac, normalize_observations: true}", actions=ACTIONS)
    learner = population([agent(dqn=algorithm)], algorithm)
    samples = np.random.default_rng(0).normal(3.0, 2.0, (1, 50, 5))
    learner.policy.update_observation_stats("observation", Moments.of(torch.from_numpy(samples), torch.ones(1, 50)))
    buffers = {name: roles["buffers"] for name, roles in learner.to_agents()[0].tensors.items()}
    assert {name: len(values) for name, values in buffers.items()} == {"temperature": 0, "critics": 3, "actor": 3}
    for name in ("actor", "critics"):
        np.testing.assert_allclose(buffers[name]["normal.observation.mean"][0], samples[0].mean(0), rtol=1e-5)


def test_curves_and_tables_show_all_networks(algorithm):
    member = agent(dqn=algorithm)
    operations.enlarge(member, algorithm.networks, "actor", "hidden.0", 40, np.random.default_rng(0))
    known = ("generation", "global_steps", "best_fitness", "mean_fitness", "elite_fitness", "env_steps_per_second")
    row = dict.fromkeys((*known, "updates_per_second"), 1.0) | {"seconds": {}, "metrics": {}, "agents": [0]}
    row |= {name: [1.0] for name in ("fitness", "train_return", "train_length")}
    row |= {"parents": [None], "mutations": ["initial"]}
    row |= {"hyperparameters": [{}], "architectures": [member.describe()["architectures"]]}
    (shown,) = record_of(row, config()).agents
    sizes = {name: value for name, value in shown.points.items() if name.startswith("architecture/")}
    assert sizes == {"architecture/units": 16 + 16 + 40 + 16, "architecture/layers": 4}, (
        "and no channels, as it has none"
    )
    assert cell({"a": {"b": 1, "c": [2]}, "d": 3}) == "a=(b=1, c=[2]), d=3"
