"""DDPG against one agent that is written plainly, and its noise."""

import gymnasium as gym
import numpy as np
import torch
from helpers.replayed import Single, check_family, perceptron, replayed_batch
from helpers.support import agent, algorithm, population, seen

from evorl.evolution import mutation as operations

ACTIONS = gym.spaces.Box(-2.0, 2.0, (2,))


def made(settings=""):
    return algorithm(f"algorithm={{name: ddpg, {settings}}}", actions=ACTIONS)


def value(p, observation, action):
    return perceptron(p, {"observation": observation, "action": action}, "value").squeeze(-1)


def test_an_agent_learns_as_the_paper_says():
    """One critic, no smoothing, no delay."""
    ddpg = made("tau: 0.1, actor_learning_rate: 2e-4")
    single = agent(dqn=ddpg)
    learner, plain = population([single], ddpg), Single(single)
    for update in range(4):
        batch = replayed_batch(ddpg, 1, seed=update)
        errors = learner.update(batch).errors
        seen, following = batch.observation["observation"][0], batch.next_observation["observation"][0]
        action = torch.tanh(perceptron(plain.target["actor"], {"observation": following}, "action"))
        goes_on = 1 - batch.columns["terminated"][0].float()
        target = batch.columns["reward"][0] + 0.99 * goes_on * value(plain.target["critics"], following, action)
        error = value(plain.p["critics"], seen, batch.columns["action"][0] / 2) - target
        torch.testing.assert_close(errors[0], error.abs().detach(), rtol=1e-4, atol=1e-5)
        plain.descend("critics", error.square().mean())
        action = torch.tanh(perceptron(plain.p["actor"], {"observation": seen}, "action"))
        plain.descend("actor", -value(plain.p["critics"], seen, action).mean())
        plain.follow("actor", "critics")
    (trained,) = learner.to_agents()
    plain.check(trained)


def test_stacks_learn_as_their_agents_do_alone():
    ddpg = made()
    check_family(ddpg, [replayed_batch(ddpg, 4, seed=seed) for seed in range(3)])


def noises(ddpg, agents, starts, deterministic=False):
    """The noise [T, P, E, A] of agents that see zeros, where episodes start as `starts` [T, P, E] says."""
    policy = population(agents, ddpg).policy
    look, found = seen(torch.zeros(*starts.shape[1:], 5)), []
    state = policy.initial_state(starts.shape[2])
    for started in starts:
        output, state = policy.act(look, started, state, deterministic)
        best, _ = policy.act(look, started, state, deterministic=True)
        found.append((output.action - best.action) / 2)
    return torch.stack(found)


def test_ornstein_uhlenbeck_noise_goes_on_within_an_episode_and_begins_anew_with_the_next():
    ddpg = made("exploration: {noise: ornstein_uhlenbeck, scale: 0.02, reversion: 0.1, random_steps: 0}")
    agents = [agent(id=0, dqn=ddpg), agent(id=1, dqn=ddpg)]
    starts = torch.zeros(60, 2, 4000, dtype=torch.bool)
    starts[0] = starts[40, 1, 2000:] = True
    noise = noises(ddpg, agents, starts)
    # x' = 0.9 x + 0.02 n from 0: after t steps the variance is 0.02^2 (1 - 0.81^t) / (1 - 0.81).
    for step in (1, 2, 5, 40):
        expected = 0.02 * ((1 - 0.81**step) / (1 - 0.81)) ** 0.5
        torch.testing.assert_close(noise[step - 1].std((1, 2)), torch.full((2,), expected), rtol=0.05, atol=0)
    innovation = noise[1:40] - 0.9 * noise[:39]
    torch.testing.assert_close(innovation.std(), torch.tensor(0.02), rtol=0.02, atol=0)
    began, went_on = noise[40, 1, 2000:], noise[40, 1, :2000]
    torch.testing.assert_close(began.std(), torch.tensor(0.02), rtol=0.05, atol=0)
    correlation = [
        np.corrcoef(noise[39, 1, own].flatten(), noise[40, 1, own].flatten())[0, 1]
        for own in (slice(2000, None), slice(2000))
    ]
    assert abs(correlation[0]) < 0.05
    assert correlation[1] > 0.8
    assert went_on.std() > 1.5 * began.std()


def test_a_setting_of_the_noise_leaves_the_others_as_they_are():
    exploration = made("exploration: {random_steps: 5}").settings.exploration
    assert (exploration.noise, exploration.scale) == ("ornstein_uhlenbeck", 0.2)


def test_agents_are_evaluated_without_noise():
    ddpg = made("exploration: {noise: ornstein_uhlenbeck, scale: 0.5, random_steps: 1000}")
    agents = [agent(dqn=ddpg)]
    assert not noises(ddpg, agents, torch.zeros(5, 1, 10, dtype=torch.bool), deterministic=True).any()


def test_agents_in_several_stacks_have_noise_of_their_own(monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", 0)
    ddpg = made("exploration: {noise: ornstein_uhlenbeck, scale: 0.02, random_steps: 0}")
    agents = [agent(id=id, dqn=ddpg) for id in range(3)]
    operations.enlarge(agents[1], ddpg.networks, "actor", "hidden.0", 40, np.random.default_rng(0))
    noise = noises(ddpg, agents, torch.zeros(3, 3, 50, dtype=torch.bool))
    change = (noise[1:] - 0.85 * noise[:-1]).std((0, 2, 3))
    torch.testing.assert_close(change, torch.full((3,), 0.02), rtol=0.2, atol=0)
