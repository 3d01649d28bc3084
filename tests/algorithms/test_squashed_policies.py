"""PPO and A2C with a squashed Gaussian, against torch's own distributions."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.kinds import rollout_batch
from helpers.support import agent, algorithm, config, population, seen
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from evorl.population import initial_population

BOX = gym.spaces.Box(np.array([0.0, -2.0], np.float32), np.array([4.0, 2.0], np.float32))
CENTRE, HALF = torch.tensor([2.0, 0.0]), torch.tensor([2.0, 2.0])
SIZES = {"a2c": "", "ppo": ", batch_size: 8, clip: 0.3"}


def made(name, **spaces):
    settings = f"algorithm={{name: {name}, distribution: squashed, entropy_coefficient: 0.1{SIZES[name]}}}"
    return algorithm(settings, **{"actions": BOX} | spaces)


def reference(outputs):
    """The distribution of actions between -1 and 1."""
    normal = Normal(outputs["action"], outputs["log_scale"].clamp(-5, 2).exp())
    return Independent(TransformedDistribution(normal, TanhTransform(cache_size=1)), 1)


@pytest.mark.parametrize("name", SIZES)
def test_actions_lie_between_the_bounds_and_come_with_their_density(name):
    chosen = made(name)
    policy = population([agent(dqn=chosen)], chosen).policy
    look, started = seen(torch.randn(1, 4000, 5)), torch.zeros(1, 4000, dtype=torch.bool)
    output, _ = policy.act(look, started, policy.initial_state(4000))
    outputs = policy.stacks[0].networks["policy"](look)
    action = torch.tanh(output.extras["unclipped_action"])
    torch.testing.assert_close(output.action, CENTRE + HALF * action)
    torch.testing.assert_close(output.extras["log_prob"], reference(outputs).log_prob(action), rtol=1e-3, atol=1e-3)
    z = (output.extras["unclipped_action"] - outputs["action"]) / outputs["log_scale"].exp()
    torch.testing.assert_close(z.std(), torch.tensor(1.0), rtol=0.05, atol=0)
    assert outputs["log_scale"].std() > 0.01, "a scale of each state"
    best, _ = policy.act(look, started, policy.initial_state(4000), deterministic=True)
    torch.testing.assert_close(best.action, CENTRE + HALF * torch.tanh(outputs["action"]))


@pytest.mark.parametrize("name", SIZES)
def test_the_loss_is_that_of_its_density_and_entropy(name):
    chosen = made(name)
    agents = [agent(dqn=chosen)]
    (stack,) = population(agents, chosen).policy.stacks
    batch = rollout_batch(chosen, agents, size=200)
    found = chosen.loss(stack, batch, torch.Generator())
    outputs = stack.networks["policy"](batch.observation)
    columns, distribution = batch.columns, reference(outputs)
    log_prob = distribution.log_prob(torch.tanh(columns["unclipped_action"]))
    if name == "ppo":
        ratio, advantage = (log_prob - columns["log_prob"]).exp(), columns["advantage"]
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage)
    else:
        policy = -log_prob * columns["advantage"]
    value = 0.5 * 0.5 * (outputs["value"].squeeze(-1) - columns["return"]).square()
    torch.manual_seed(0)
    samples = distribution.rsample((20_000,))
    entropy = -distribution.log_prob(samples.clamp(-1 + 1e-6, 1 - 1e-6)).mean(0)
    torch.testing.assert_close(found.per_sample, policy + value - 0.1 * entropy, rtol=1e-3, atol=5e-3)


MODULE = "network={name: module, factory: 'helpers.support:probe_network'}"


@pytest.mark.parametrize("name", [*SIZES, "appo"])
@pytest.mark.parametrize(
    ("distribution", "network"), [("gaussian", "network={}"), ("gaussian", MODULE), ("squashed", "network={}")]
)
def test_exploration_begins_with_the_configured_standard_deviation(name, distribution, network):
    settings = f"algorithm={{name: {name}, distribution: {distribution}, initial_log_std: -2}}"
    chosen = algorithm(settings, network, actions=BOX)
    new = initial_population(config(settings, network, "population.size=1"), chosen)
    policy = population(new, chosen).policy
    look, started = seen(torch.randn(1, 4000, 5)), torch.zeros(1, 4000, dtype=torch.bool)
    output, _ = policy.act(look, started, policy.initial_state(4000))
    noise = output.extras["unclipped_action"] - policy.stacks[0].networks["policy"](look)["action"]
    torch.testing.assert_close(noise.std((0, 1)), torch.full((2,), -2.0).exp(), rtol=0.05, atol=0)
