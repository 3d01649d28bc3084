"""A subclass of DQN that adds a loss of all actions, as conservative Q-learning does (arXiv 2006.04779)."""

import torch
from helpers.dqns import DQNS
from helpers.support import agent, batch, config, interface, population

from evorl.algorithms.dqn import DQN

ALPHA = 0.7


class CQL(DQN):
    """DQN with the penalty log sum_a exp Q(s, a) - Q(s, a_taken) of arXiv 2006.04779, eq. 4."""

    def penalty(self, stack, batch, atoms):
        q_values = self.values.mean(atoms)
        q_of_action = q_values.gather(-1, batch.columns["action"].unsqueeze(-1)).squeeze(-1)
        return ALPHA * (q_values.logsumexp(-1) - q_of_action)


def test_the_gradient_is_that_of_autograd_of_the_whole_loss():
    """Autograd goes through a plain call of the network, with the penalty written apart from DQN's own loss."""
    dqn, cql = (kind(config(*DQNS["categorical, dueling, not double"]), interface()) for kind in (DQN, CQL))
    agents = [agent(id=id, dqn=cql) for id in range(2)]
    some, generator = batch(agents), torch.Generator()
    gradients = {}
    for kind in (dqn, cql):
        learner = population(agents, kind)
        (objective,), (stack,) = kind.objectives, learner.policy.stacks
        loss = learner.stacks[0].networks["q"].loss(objective, stack, some, generator)
        gradients[kind] = loss.per_sample.detach(), learner.stacks[0].networks["q"].gradient.clone()
    network = stack.networks["q"]
    q_values = cql.q_values(network(some.observation))
    penalty = ALPHA * (q_values.exp().sum(-1).log() - q_values.gather(-1, some.columns["action"][..., None])[..., 0])
    torch.testing.assert_close(gradients[cql][0], gradients[dqn][0] + penalty)
    expected = network.gradient(penalty, some.weight)
    torch.testing.assert_close(gradients[cql][1], gradients[dqn][1] + expected)
    assert expected.abs().max() > 1e-3
