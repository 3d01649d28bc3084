"""DQN against values worked by hand, and on environments whose values are known."""

import numpy as np
import pytest
import torch
from helpers.support import (
    agent,
    algorithm,
    batch,
    greedy,
    lines,
    population,
    seen,
    train,
    trained,
)

from evorl.networks.stack import StackedNetwork
from evorl.population.evaluation import evaluate
from evorl.types.agents import Architecture


@pytest.mark.parametrize("double", [True, False])
def test_the_loss_is_the_papers_for_each_agent(double):
    dqn = algorithm(f"algorithm.double={double}")
    agents = [agent(id=0, dqn=dqn, gamma=0.9), agent(id=1, dqn=dqn, gamma=0.5)]
    stack = population(agents, dqn).policy.stacks[0]
    some = batch(agents)
    losses = (dqn.loss(stack, some, torch.Generator()).per_sample.detach() * some.weight).sum(-1)
    module, target_module = stack.networks["q"], stack.target_networks["q"]
    with torch.no_grad():
        now, following = some.observation, some.next_observation
        networks = (module(now), module(following), target_module(following))
        q, next_q, target_q = (dqn.q_values(outputs) for outputs in networks)
    for p, gamma in enumerate((0.9, 0.5)):
        total = 0.0
        for b in range(8):
            chosen = next_q[p, b].argmax() if double else target_q[p, b].argmax()
            value = 0.0 if some.columns["terminated"][p, b] else float(target_q[p, b, chosen])
            target = float(some.columns["reward"][p, b]) + gamma * value
            total += (float(q[p, b, some.columns["action"][p, b]]) - target) ** 2
        assert float(losses[p]) == pytest.approx(total / 8, rel=1e-5)


def test_an_actor_whose_network_is_its_own_target_computes_next_values_once(monkeypatch):
    dqn = algorithm()
    agents = [agent(dqn=dqn)]
    learner = population(agents, dqn)
    (stack,) = learner.policy.stacks
    stack.target_networks = dict(stack.networks)
    calls, forward = [], StackedNetwork.forward_recurrent
    monkeypatch.setattr(StackedNetwork, "forward_recurrent", lambda *given: calls.append(1) or forward(*given))
    dqn.loss(stack, batch(agents), torch.Generator())
    assert len(calls) == 2


def test_targets_follow_by_each_agents_tau():
    dqn = algorithm()
    agents = [agent(id=0, dqn=dqn, tau=0.5), agent(id=1, dqn=dqn, tau=0.01)]
    group = population(agents, dqn)
    group.update(batch(agents))
    for before, after, tau in zip(agents, group.to_agents(), (0.5, 0.01), strict=True):
        old, new = before.tensors["q"]["target"], after.tensors["q"]
        for name, value in old.items():
            torch.testing.assert_close(new["target"][name], value + tau * (new["parameters"][name] - value))


def test_targets_are_copied_every_so_many_updates_of_each_agent():
    dqn = algorithm("algorithm={target: periodic, target_period: 3}")
    agents = [agent(id=0, dqn=dqn, target_period=3.0), agent(id=1, dqn=dqn, target_period=2.0)]
    group, copied = population(agents, dqn), [[], []]
    for update in range(1, 7):
        before = [member.tensors["q"]["target"] for member in group.to_agents()]
        group.update(batch(agents, seed=update))
        for index, member in enumerate(group.to_agents()):
            now = member.tensors["q"]
            follows = all(torch.equal(value, now["parameters"][name]) for name, value in now["target"].items())
            stays = all(torch.equal(value, before[index][name]) for name, value in now["target"].items())
            assert follows != stays
            copied[index] += [update] if follows else []
    assert copied == [[3, 6], [2, 4, 6]]


def test_each_agent_explores_with_its_own_epsilon():
    dqn = algorithm("algorithm.exploration={start: 1.0, end: 0.1, decay: 0.5}")
    agents = [agent(id=index, dqn=dqn) for index in range(3)]
    for member, epsilon in zip(agents, (0.0, 0.3, 1.0), strict=True):
        member.state.acting["epsilon"] = epsilon
    group = population(agents, dqn)
    observation = seen(torch.randn(1, 1, 5).expand(3, 40_000, 5))
    state, started = group.policy.initial_state(40_000), torch.zeros(3, 40_000, dtype=torch.bool)
    best, _ = greedy(group, observation)
    actions = group.policy.act(observation, started, state)[0].action
    different = (actions != best).float().mean(1)
    # A random action is the greedy one in a third of cases.
    torch.testing.assert_close(different, torch.tensor([0.0, 0.2, 2 / 3]), atol=0.02, rtol=0)


def test_epsilon_decays_by_steps_and_stays_with_the_agent():
    dqn = algorithm("algorithm.exploration={start: 1.0, end: 0.1, decay: 0.9}")
    group = population([agent(dqn=dqn)], dqn)
    group.policy.act(seen(torch.zeros(1, 3, 5)), torch.zeros(1, 3, dtype=torch.bool), group.policy.initial_state(3))
    assert group.to_agents()[0].state.acting["epsilon"] == 1.0, "what counts is what the environments made of it"
    group.policy.acted(np.array([6.0]))
    assert group.to_agents()[0].state.acting["epsilon"] == pytest.approx(0.9**6, rel=1e-12)
    for _ in range(20):
        group.policy.acted(np.array([6.0]))
    member = group.to_agents()[0]
    assert member.state.acting["epsilon"] == pytest.approx(0.1)
    assert population([member.child(9)], dqn).policy.stacks[0].state["epsilon"].item() == pytest.approx(0.1)


def test_a_linear_schedule_is_at_its_end_after_its_steps():
    dqn = algorithm("algorithm.exploration={schedule: linear, start: 0.9, end: 0.1, steps: 40}")
    group = population([agent(id=0, dqn=dqn), agent(id=1, dqn=dqn)], dqn)
    found = []
    for _ in range(5):
        group.policy.acted(np.array([10.0, 5.0]))
        found.append([member.state.acting["epsilon"] for member in group.to_agents()])
    expected = [[0.7, 0.8], [0.5, 0.7], [0.3, 0.6], [0.1, 0.5], [0.1, 0.4]]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("schedule", ["{schedule: linear, steps: 40, start: 0.02}", "{start: 0.02}"])
def test_a_schedule_that_starts_below_its_end_stays_at_its_end(schedule):
    dqn = algorithm(f"algorithm.exploration={schedule}")
    group = population([agent(dqn=dqn)], dqn)
    for _ in range(5):
        group.policy.acted(np.array([400.0]))
        assert group.to_agents()[0].state.acting["epsilon"] == pytest.approx(0.05)


def test_exploration_falls_by_transitions_and_not_by_resets(in_directory):
    """Native CartPole spends a step on each reset."""
    explores = "algorithm.exploration={start: 1.0, end: 0.0, decay: 0.99}"
    assert train("run.name=a", explores, "training.max_steps=40", "evolution.steps=200", "population.size=2") == 0
    (row,) = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert row["global_steps"] < 2 * 200
    exponents = [np.log(state["epsilon"]) / np.log(0.99) for state in row["state"]]
    assert sum(exponents) == pytest.approx(row["global_steps"], rel=1e-9)


def test_counts_go_on_beyond_what_single_precision_can_count():
    a2c = algorithm("algorithm={name: a2c, rollout_steps: 8}")
    member = agent(dqn=a2c)
    member.state.acting["steps"] = 2.0**27
    group = population([member, agent(id=1, dqn=a2c)], a2c)
    for _ in range(3):
        group.policy.acted(np.array([1.0, 2.0]))
    assert [member.state.acting["steps"] for member in group.to_agents()] == [2.0**27 + 3, 6.0]
    dqn = algorithm()
    group = population([agent(dqn=dqn)], dqn)
    group.stacks[0].updates += 2.0**24
    group.update(batch([agent(dqn=dqn)]))
    assert group.metrics().updates == 2.0**24 + 1


def learned(*overrides, steps=400):
    """The q-values [2, 2] of a population of two for what each probe shows, after training, with its environments."""
    learner, environments = trained(
        "environment.id=helpers.probes:Probe-v0", "environment.num_envs=4", "algorithm.gamma=0.5",
        "algorithm.tau=0.1", "algorithm.batch_size=32", "algorithm.learn_step=4",
        "algorithm.exploration={start: 1.0, end: 1.0}", "replay.capacity=2000", *overrides, steps=steps,
    )  # fmt: skip
    shown = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).expand(2, 2, 2)
    stacks = learner.policy.stacks
    with torch.no_grad():
        outputs = [stack.networks["q"](seen(shown[stack.members])) for stack in stacks]
    q = learner.policy.joined([learner.policy.algorithm.q_values(each) for each in outputs])
    return q, learner, environments


def test_probe_a_terminated_step_is_worth_its_reward():
    q, group, environments = learned()
    torch.testing.assert_close(q, torch.eye(2).expand(2, 2, 2), atol=0.1, rtol=0)
    returns = evaluate(group.policy, environments, range(3, 13), None).returns
    assert returns.shape == (2, 10)
    assert (returns == 1).all()


def test_probe_two_steps_discount_the_second():
    """Nothing shows which of two steps it is: the wrong action is worth half of 0.5, the right one 1 more."""
    q, _, _ = learned("environment.kwargs={steps: 2}")
    # V = 1 + 0.5 * V / 2, as the step after next exists half of the time.
    value = 1 / (1 - 0.25)
    torch.testing.assert_close(q, value - 1 + torch.eye(2).expand(2, 2, 2), atol=0.2, rtol=0)


def test_a_users_own_network_learns_the_same():
    q, _, _ = learned("network={name: module, factory: 'helpers.support:probe_network'}")
    torch.testing.assert_close(q, torch.eye(2).expand(2, 2, 2), atol=0.15, rtol=0)


def test_frozen_and_unused_parameters_of_a_module_stay():
    dqn = algorithm("network={name: module, factory: 'helpers.support:partly_frozen'}")
    members = [agent(Architecture(), id=index, dqn=dqn) for index in range(2)]
    group = population(members, dqn)
    group.update(batch(members))
    for before, after in zip(members, group.to_agents(), strict=True):
        old, new = before.tensors["q"], after.tensors["q"]
        torch.testing.assert_close(new["buffers"], old["buffers"], rtol=0, atol=0)
        assert set(new["buffers"]) == {"0.weight", "0.bias"}
        assert torch.equal(new["parameters"]["2.unused.weight"], old["parameters"]["2.unused.weight"])
        assert not torch.equal(new["parameters"]["2.weight"], old["parameters"]["2.weight"])
