"""The learning contract: what a policy is, and what objectives and targets a learner can serve."""

import numpy as np
import pytest
import torch
from helpers.support import OBSERVATIONS, agent, algorithm, batch, greedy, population, seen

from evorl.algorithms.base import Objective, hyperparameter
from evorl.algorithms.dqn import DQN
from evorl.networks.stack import NetworkSpec, Periodic
from evorl.population import Learner, Policy
from evorl.types.agents import Architecture
from evorl.types.batches import Loss

MIXED = [
    Architecture((16, 16), (0, 0), "relu"),
    Architecture((200, 20), (1, 0), "relu"),
    Architecture((16, 33), (0, 2), "tanh"),
    Architecture((16, 16), (0, 0), "relu"),
]


class TwoNetworks(DQN):
    """An algorithm with two networks: a critic, and an actor that every other update changes and each third copies."""

    def __init__(self, config, interface):
        super().__init__(config, interface)
        q = self.networks["q"]
        self.networks = {"critic": q, "q": NetworkSpec(q.network, q.architecture, target=Periodic("learn_step"))}
        rate = hyperparameter("learning_rate")
        self.drawn, self.order = [], []
        self.objectives = [
            Objective("critic", self.critic_loss, rate),
            Objective("q", self.actor_loss, rate, every=2, max_grad_norm=lambda stack: torch.full((2,), 1e-3)),
        ]

    def critic_loss(self, stack, batch, generator):
        self.order.append("critic")
        self.drawn.append(torch.rand((), generator=generator).item())
        errors = stack.networks["critic"](batch.observation)["q_values"].mean(-1) - batch.columns["reward"]
        return Loss(errors.square(), errors=errors.detach())

    def actor_loss(self, stack, batch, generator):
        self.order.append("q")
        value = stack.networks["q"](batch.observation)["q_values"].mean(-1)
        return Loss(-value)


@pytest.fixture
def two():
    base = algorithm("algorithm.learn_step=3")
    made = TwoNetworks(base.config, base.interface)
    return made, [agent(id=id, dqn=made) for id in range(2)]


def test_each_objective_has_its_network_its_period_and_the_generator(two):
    made, agents = two
    learner = population(agents, made)
    before = {name: learner.policy.stacks[0].networks[name].parameters.flat.clone() for name in made.networks}
    changed = []
    for seed in range(4):
        learner.update(batch(agents, seed=seed))
        now = {name: learner.policy.stacks[0].networks[name].parameters.flat.clone() for name in made.networks}
        changed.append({name for name in now if not torch.equal(now[name], before[name])})
        before = now
    assert changed == [{"critic", "q"}, {"critic"}] * 2
    assert made.order == ["critic", "q", "critic"] * 2
    assert len(set(made.drawn)) == 4
    state = learner.to_agents()[0].state
    assert state.updates == {"critic": 4, "q": 2}


def test_a_periodic_target_is_the_network_of_its_last_copy(two):
    made, agents = two
    learner = population(agents, made)
    network, target = learner.policy.stacks[0].networks["q"], learner.policy.stacks[0].target_networks["q"]
    equal = []
    for seed in range(6):
        learner.update(batch(agents, seed=seed))
        equal.append(torch.equal(network.parameters.flat, target.parameters.flat))
    # Updates of the network come first, third and fifth; the copy comes with every third of them.
    assert equal == [False, False, False, False, True, True]


def test_only_networks_that_ask_for_a_target_have_one():
    a2c = algorithm("algorithm={name: a2c, rollout_steps: 8}")
    assert "target" not in agent(dqn=a2c).tensors["policy"]
    assert not population([agent(dqn=a2c)], a2c).policy.stacks[0].target_networks
    assert "target" in agent().tensors["q"]


def test_a_policy_is_its_flat_buffer():
    dqn = algorithm()
    agents = [agent(shape, id=index, dqn=dqn) for index, shape in enumerate(MIXED)]
    learner = population(agents, dqn)
    received = Policy([member.child(9 + member.id) for member in agents], dqn, torch.Generator())
    for seed in range(3):
        learner.update(batch(agents, seed=seed))
    look = seen(torch.randn(4, 6, *OBSERVATIONS.shape))
    assert not torch.equal(learner.policy.value(look, None), received.value(look, None))
    received.flat.copy_(learner.policy.flat)
    torch.testing.assert_close(learner.policy.value(look, None), received.value(look, None), rtol=0, atol=0)
    assert learner.policy.version == 3


def test_an_agent_is_printed_without_its_tensors():
    assert "tensor(" not in repr(agent())


def test_agents_keep_their_order_whatever_the_packing(monkeypatch):
    dqn = algorithm()
    agents = [agent(shape, id=index, dqn=dqn) for index, shape in enumerate(MIXED)]
    look, found = seen(torch.randn(4, 6, *OBSERVATIONS.shape)), []
    for overhead in (0, 10**9):
        monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
        learner = population(agents, dqn)
        for seed in range(3):
            learner.update(batch(agents, seed=seed))
        assert [member.id for member in learner.to_agents()] == [0, 1, 2, 3]
        found.append((greedy(learner, look)[0], learner.policy.value(look, None), learner.metrics().sums["loss"]))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    torch.testing.assert_close(*(torch.from_numpy(losses) for _, _, losses in found), rtol=1e-4, atol=1e-6)


def test_a_batch_stays_as_it_is_and_the_result_says_what_became_of_it():
    dqn, agents = algorithm(), [agent(id=id) for id in range(3)]
    some = batch(agents)
    some.columns["reward"][1] = torch.nan
    some.due[2] = 0
    result = Learner(Policy(agents, dqn, torch.Generator())).update(some)
    assert some.due.tolist() == [1, 1, 0]
    assert result.active.tolist() == [1, 0, 0]
    assert result.errors.shape == some.weight.shape


@pytest.mark.parametrize("overhead", [0, 10**9], ids=["stacks of one", "one stack"])
def test_importance_weights_scale_gradients_and_not_what_is_reported(overhead, monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
    agents = [agent(id=id) for id in range(2)]
    plain, weighed = batch(agents), batch(agents)
    # The second agent's batch has two elements that only fill it up.
    counted = torch.tensor([[1.0] * 8, [1.0] * 6 + [0.0] * 2])
    plain.weight = counted / counted.sum(-1, keepdim=True)
    weighed.share = plain.weight
    weighed.weight = plain.weight * torch.rand(2, 8, generator=torch.Generator().manual_seed(0)) ** 3
    learners = [population(agents), population(agents)]
    errors = [learner.update(each).errors for learner, each in zip(learners, (plain, weighed), strict=True)]
    first, second = (learner.metrics().sums for learner in learners)
    for name in ("td_error", "q_values", "loss"):
        np.testing.assert_allclose(first[name], second[name], rtol=1e-6)
    mean = (errors[1].abs() * counted).sum(-1) / counted.sum(-1)
    np.testing.assert_allclose(second["td_error"], mean, rtol=1e-5)
    assert (second["gradient_norm"] < 0.7 * first["gradient_norm"]).all()


def test_metrics_come_from_all_agents_whatever_their_learn_steps():
    learner = population([agent(id=id) for id in range(3)])
    for update in range(4 * 17):
        some = batch(learner.policy.agents, seed=update)
        some.due = torch.tensor([1.0, float(update % 2), float(update % 4 == 3)])
        learner.update(some)
    assert learner.metrics().counts["td_error"].tolist() == [4, 2, 1]


def test_agents_with_few_updates_have_metrics_although_the_first_update_was_another_agent_s():
    """Agents with learning steps of 4 and 6 over 12 environment steps: one update is partial before a common one."""
    learner = population([agent(id=id) for id in range(2)])
    for update, due in enumerate(([1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0])):
        some = batch(learner.policy.agents, seed=update)
        some.due, some.all_due = torch.tensor(due), min(due) == 1
        learner.update(some)
    assert learner.metrics().counts["td_error"].tolist() == [2, 1]
