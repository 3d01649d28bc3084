"""An agent of three networks: an actor, twin critics that read its action, and a temperature that reads nothing."""

import copy
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import agent, batch_of, config, interface, population

from evorl.algorithms.base import ActInput, ActOutput, Algorithm, Objective, hyperparameter
from evorl.algorithms.functional import td_target
from evorl.config import ArchitectureLimits
from evorl.envs.spaces import with_action
from evorl.evolution import mutation as operations
from evorl.evolution.mutation import MUTATIONS, Context
from evorl.networks import initial_architecture
from evorl.networks.stack import NetworkSpec, Polyak
from evorl.networks.standard import StandardNetwork
from evorl.population import check_agents
from evorl.replay.statistics import Moments
from evorl.runs.output.metrics import record_of
from evorl.system.formats import decode_agents, encode_agents
from evorl.tracking.wandb import cell
from evorl.types.agents import Architecture, Head
from evorl.types.batches import Loss
from evorl.types.outcomes import UserError

ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,))


class ThreeNetworks(Algorithm):
    """Losses like those of SAC (arXiv 1812.05905) with TD3's target actor and delay; noise comes with the batch."""

    metrics = ("loss",)

    def __init__(self, config, interface, normalized=()):
        super().__init__(config, interface)
        read = with_action(interface, "some", interface.parts)
        actor = StandardNetwork(interface.parts, [Head("mean", 2), Head("log_scale", 2)], (), "uniform")
        critics = StandardNetwork(read, [Head("first", 1), Head("second", 1)], normalized, "uniform")
        temperature = StandardNetwork({}, [Head("log_temperature", 1, constant=True)], (), "uniform")
        follow, rate = Polyak("tau"), hyperparameter("learning_rate")
        self.networks = {
            "temperature": NetworkSpec(temperature, Architecture()),
            "critics": NetworkSpec(critics, initial_architecture(config.network, read, "all"), follow),
            "actor": NetworkSpec(actor, initial_architecture(config.network, interface.parts), follow),
        }
        self.objectives = [
            Objective("critics", self.critic_loss, rate),
            Objective("actor", self.actor_loss, rate, every=2),
            Objective("temperature", self.temperature_loss, rate),
        ]

    def initial_state(self):
        return {}

    def pace(self, copies):
        raise NotImplementedError

    def experience(self, placement, always_valid, stopwatch):
        raise NotImplementedError

    def act(self, stack, given):
        return ActOutput(torch.tanh(stack.networks["actor"](given.observation)["mean"]))

    def value(self, stack, observation, recurrent):
        action = self.act(stack, ActInput(observation, recurrent, None)).action
        return smaller(stack.networks["critics"], observation, action)

    def critic_loss(self, stack, batch, generator):
        with torch.no_grad():
            action, log_prob = sampled(stack.target_networks["actor"](batch.next_observation), batch.columns["noise"])
            value = (
                smaller(stack.target_networks["critics"], batch.next_observation, action) - heat(stack).exp() * log_prob
            )
            reward, terminated = batch.columns["reward"], batch.columns["terminated"]
            target = td_target(reward, terminated, stack.hyperparameters["gamma"].unsqueeze(-1), value)
        outputs = stack.networks["critics"]({**batch.observation, "action": batch.columns["action"]})
        errors = sum((value.squeeze(-1) - target).square() for value in outputs.values())
        return Loss(errors, errors=errors.detach())

    def actor_loss(self, stack, batch, generator):
        action, log_prob = sampled(stack.networks["actor"](batch.observation), batch.columns["noise"])
        value = smaller(stack.networks["critics"], batch.observation, action)
        return Loss(heat(stack).exp().detach() * log_prob - value)

    def temperature_loss(self, stack, batch, generator):
        with torch.no_grad():
            _, log_prob = sampled(stack.networks["actor"](batch.observation), batch.columns["noise"])
        return Loss(-heat(stack) * (log_prob - 2))


def sampled(outputs, noise):
    """Squashed actions [P, B, 2] and their log-probabilities [P, B], but for a constant."""
    log_scale = outputs["log_scale"].clamp(-5, 2)
    action = torch.tanh(outputs["mean"] + log_scale.exp() * noise)
    return action, (-0.5 * noise.square() - log_scale - (1 - action.square() + 1e-6).log()).sum(-1)


def smaller(critics, observation, action):
    """The smaller of both critics' values [P, B]."""
    return torch.minimum(*critics({**observation, "action": action}).values()).squeeze(-1)


def heat(stack):
    """The logarithm of the temperature [P, 1]."""
    return stack.networks["temperature"]({})["log_temperature"].squeeze(-1)


@pytest.fixture
def algorithm():
    return ThreeNetworks(config(), interface(actions=ACTIONS))


def family(algorithm):
    """Agents whose networks differ in widths and depths, each in other networks."""
    members, rng = [agent(id=id, dqn=algorithm, tau=0.1 * (id + 1)) for id in range(5)], np.random.default_rng(0)
    operations.enlarge(members[1], algorithm.networks, "actor", "hidden.0", 40, rng)
    operations.add_layer(members[2], algorithm.networks, "critics", "hidden.1", rng)
    operations.enlarge(members[3], algorithm.networks, "critics", "hidden.0", 20, rng)
    for member in members:
        generator = torch.Generator().manual_seed(member.id)
        for role in ("parameters", "target"):
            for value in member.tensors["critics"][role].values():
                value += 0.1 * torch.randn(value.shape, generator=generator)
    return members


def batch(agents, seed=0, size=8):
    generator, count = torch.Generator().manual_seed(seed), len(agents)

    def numbers(*shape):
        return torch.randn(count, size, *shape, generator=generator)

    fields = {"observation.observation": numbers(5), "next_observation.observation": numbers(5), "reward": numbers()}
    fields |= {"action": torch.tanh(numbers(2)), "noise": numbers(2), "terminated": numbers() > 1}
    return batch_of(fields, torch.full((count, size), 1 / size), torch.ones(count))


def outputs(member, algorithm):
    """What all of an agent's networks and target copies put out."""
    (stack,) = population([member], algorithm).policy.stacks
    generator = torch.Generator().manual_seed(0)
    look = {name: torch.randn(1, 9, size, generator=generator) for name, size in (("observation", 5), ("action", 2))}
    networks = [*stack.networks.values(), *stack.target_networks.values()]
    return [value for network in networks for value in network(look).values()]


@pytest.mark.parametrize("overhead", [0, 10**9])
def test_stacks_act_and_learn_as_their_agents_do_alone(algorithm, overhead, monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
    agents = family(algorithm)
    together = population(agents, algorithm)
    assert (len(together.policy.stacks) == 1) == (overhead > 0)
    look, started = {"observation": torch.randn(5, 3, 5)}, torch.zeros(5, 3, dtype=torch.bool)
    state = together.policy.initial_state(3)
    assert state.numel() == 0
    action, value = together.policy.act(look, started, state)[0].action, together.policy.value(look, None)
    batches = [batch(agents, seed) for seed in range(4)]
    for whole in batches:
        together.update(whole)
    trained = together.to_agents()
    for index, single in enumerate(agents):
        alone, own = population([single], algorithm), slice(index, index + 1)
        seen = {"observation": look["observation"][own]}
        torch.testing.assert_close(alone.policy.act(seen, started[own], state[own])[0].action[0], action[index])
        torch.testing.assert_close(alone.policy.value(seen, None)[0], value[index])
        for whole in batches:
            alone.update(whole.part(own))
        (expected,) = alone.to_agents()
        torch.testing.assert_close(trained[index].tensors, expected.tensors)
        assert trained[index].state == expected.state
        assert trained[index].fault is None
        assert all(trained[index].tensors["temperature"]["parameters"]["log_temperature.bias"] != 0)


def test_the_actor_and_its_target_wait_for_every_second_update(algorithm):
    learner = population([agent(id=id, dqn=algorithm) for id in range(2)], algorithm)
    (stack,) = learner.policy.stacks

    def values():
        copies = stack.networks | {f"{name}'s target": network for name, network in stack.target_networks.items()}
        return {name: network.parameters.flat.clone() for name, network in copies.items()}

    before, always = values(), {"critics", "critics's target", "temperature"}
    assert before.keys() == {*always, "actor", "actor's target"}
    for seed in range(4):
        learner.update(batch(learner.policy.agents, seed))
        now = values()
        changed = {name for name in now if not torch.equal(now[name], before[name])}
        assert changed == (always if seed % 2 else always | {"actor", "actor's target"})
        before = now
    assert learner.to_agents()[0].state.updates == {"temperature": 4, "critics": 4, "actor": 2}


@pytest.mark.parametrize("name", ["actor", "critics"])
def test_growth_of_one_network_keeps_what_all_compute(algorithm, name):
    learner, rng = population(family(algorithm), algorithm), np.random.default_rng(0)
    learner.update(batch(learner.policy.agents))
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
    learner.update(batch([member]))
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
    torch.testing.assert_close([member.tensors for member in found], [member.tensors for member in agents])


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
    assert sorted(sorted(policy.places(stack)) for stack in policy.stacks) == [[0, 3, 4], [1, 2]]
    for stack in policy.stacks:
        for name, network in stack.networks.items():
            shapes = [policy.agents[place].architectures[name] for place in policy.places(stack)]
            assert {shape.activation for shape in shapes} == {network.layout.architecture.activation}
            assert all(shape.hidden_sizes <= network.layout.architecture.hidden_sizes for shape in shapes)
    spec = algorithm.networks["temperature"]
    assert spec.network.cost(spec.architecture) <= 1
    assert spec.network.recurrent_shape(spec.architecture) == (0, 0)


def test_only_networks_that_normalise_a_part_take_its_statistics():
    algorithm = ThreeNetworks(config(), interface(actions=ACTIONS), normalized=("observation",))
    learner = population([agent(dqn=algorithm)], algorithm)
    samples = np.random.default_rng(0).normal(3.0, 2.0, (1, 50, 5))
    learner.policy.update_observation_stats("observation", Moments.of(samples, np.ones((1, 50))))
    buffers = {name: roles["buffers"] for name, roles in learner.to_agents()[0].tensors.items()}
    assert {name: len(values) for name, values in buffers.items()} == {"temperature": 0, "critics": 3, "actor": 0}
    np.testing.assert_allclose(buffers["critics"]["normal.observation.mean"][0], samples[0].mean(0), rtol=1e-5)


def test_curves_and_tables_show_all_networks(algorithm):
    member = agent(dqn=algorithm)
    operations.enlarge(member, algorithm.networks, "actor", "hidden.0", 40, np.random.default_rng(0))
    known = ("generation", "global_steps", "best_fitness", "mean_fitness", "elite_fitness", "env_steps_per_second")
    row = dict.fromkeys((*known, "updates_per_second"), 1.0) | {"seconds": {}, "metrics": {}, "agents": [0]}
    row |= {name: [1.0] for name in ("fitness", "train_return", "train_length")}
    row |= {"parents": [None], "parent_generations": [None], "mutations": ["initial"]}
    row |= {"hyperparameters": [{}], "architectures": [member.describe()["architectures"]]}
    (shown,) = record_of(row, config()).agents
    sizes = {name: value for name, value in shown.points.items() if name.startswith("architecture/")}
    assert sizes == {"architecture/units": 16 + 16 + 40 + 16, "architecture/layers": 4}, (
        "and no channels, as it has none"
    )
    assert cell({"a": {"b": 1, "c": [2]}, "d": 3}) == "a=(b=1, c=[2]), d=3"
