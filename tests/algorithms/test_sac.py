"""SAC against one agent that is written plainly, for continuous actions and for choices."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.replayed import (
    Single,
    check_family,
    deviation,
    features,
    generator,
    perceptron,
    replayed_batch,
    twin_values,
)
from helpers.support import agent, algorithm, population, seen
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from evorl.algorithms.state_dependent import NOISE
from evorl.networks.distributions import SquashedGaussian

BOX = gym.spaces.Box(np.array([0.0, -2.0], np.float32), np.array([4.0, 2.0], np.float32))
CENTRE, HALF = torch.tensor([2.0, 0.0]), torch.tensor([2.0, 2.0])
CHOICE = gym.spaces.Discrete(3)


def made(settings="", *overrides, **spaces):
    return algorithm(f"algorithm={{name: sac, {settings}}}", *overrides, **{"actions": BOX} | spaces)


def head_scale(p, observation):
    """The standard deviation that a head of its own gives."""
    return perceptron(p, {"observation": observation}, "log_scale").clamp(-5, 2).exp()


def feature_scale(p, observation):
    """The standard deviation of noise that is a function of the state."""
    scale = deviation(features(p, observation), p[f"{NOISE}.weight"], -1.5)
    return scale.clamp(math.exp(-5), math.exp(2))


def squashed(p, observation, noise, scale=head_scale):
    """A sample and its log-probability by torch's own distributions."""
    mean, scale = perceptron(p, {"observation": observation}, "action"), scale(p, observation)
    normal = TransformedDistribution(Normal(mean, scale), TanhTransform(cache_size=1))
    action = torch.tanh(mean + scale * noise)
    return action, normal.log_prob(action).sum(-1)


def heat(plain, initial):
    return plain.p["temperature"]["log_temperature.bias"].squeeze() + math.log(initial)


@pytest.mark.parametrize(
    ("noise", "scale"),
    [("", head_scale), ("state_dependent_noise: {initial_log_scale: -1.5},", feature_scale)],
    ids=["head", "function of the state"],
)
def test_an_agent_learns_as_the_paper_says(noise, scale):
    sac = made(
        f"{noise} tau: 0.1, actor_learning_rate: 5e-3, initial_temperature: 0.5, target_entropy: -0.7, gamma: 0.9"
    )
    single = agent(dqn=sac)
    learner, plain, draws = population([single], sac), Single(single), generator()
    for update in range(5):
        batch = replayed_batch(sac, 1, seed=update)
        errors = learner.update(batch).errors

        now, following = batch.observation["observation"][0], batch.next_observation["observation"][0]
        with torch.no_grad():
            action, log_prob = squashed(plain.p["actor"], following, torch.randn(1, 8, 2, generator=draws)[0], scale)
            value = torch.minimum(*twin_values(plain.target["critics"], following, action))
            value = value - heat(plain, 0.5).exp() * log_prob
            target = batch.columns["reward"][0] + 0.9 * ~batch.columns["terminated"][0] * value
        done = (batch.columns["action"][0] - CENTRE) / HALF
        first, second = twin_values(plain.p["critics"], now, done)
        expected = ((first - target).abs() + (second - target).abs()) / 2
        torch.testing.assert_close(errors[0], expected.detach(), rtol=1e-4, atol=1e-4)
        plain.descend("critics", (first - target).square().mean() + (second - target).square().mean())
        plain.follow("critics")

        action, log_prob = squashed(plain.p["actor"], now, torch.randn(1, 8, 2, generator=draws)[0], scale)
        value = torch.minimum(*twin_values(plain.p["critics"], now, action))
        plain.descend("actor", (heat(plain, 0.5).exp().detach() * log_prob - value).mean())

        plain.descend("temperature", -(heat(plain, 0.5) * (log_prob.detach() - 0.7)).mean())
        if update == 0:  # That Adam's steps have the right sign alone would not say so.
            gradient = plain.p["temperature"]["log_temperature.bias"].grad.abs().item()
            assert learner.metrics().sums["temperature_gradient_norm"] == pytest.approx(gradient, rel=1e-4)
    (trained,) = learner.to_agents()
    plain.check(trained)
    assert trained.tensors["actor"].keys() == {"parameters", "buffers", "mean", "square"}, "no target actor"


def test_an_agent_that_chooses_learns_as_the_paper_says():
    sac = made("tau: 0.1, target_entropy_share: 0.4", actions=CHOICE, masked=True)
    single = agent(dqn=sac)
    learner, plain = population([single], sac), Single(single)

    def policy(looks):
        logits = perceptron(plain.p["actor"], {"observation": looks["observation"][0]}, "action")
        logits = logits.masked_fill(~looks["action_mask"][0], -1e8)
        return logits.softmax(-1), logits.log_softmax(-1)

    for update in range(5):
        batch = replayed_batch(sac, 1, seed=update)
        errors = learner.update(batch).errors

        now, following = batch.observation, batch.next_observation
        with torch.no_grad():
            probability, log_prob = policy(following)
            value = torch.minimum(*twin_values(plain.target["critics"], following["observation"][0]))
            value = (probability * (value - heat(plain, 1.0).exp() * log_prob)).sum(-1)
            target = batch.columns["reward"][0] + 0.99 * ~batch.columns["terminated"][0] * value
        both = [
            each.gather(-1, batch.columns["action"][0, :, None])[:, 0]
            for each in twin_values(plain.p["critics"], now["observation"][0])
        ]
        expected = sum((each - target).abs() for each in both) / 2
        torch.testing.assert_close(errors[0], expected.detach(), rtol=1e-4, atol=1e-4)
        plain.descend("critics", sum((each - target).square().mean() for each in both))
        plain.follow("critics")

        probability, log_prob = policy(now)
        value = torch.minimum(*twin_values(plain.p["critics"], now["observation"][0])).detach()
        loss = (probability * (heat(plain, 1.0).exp().detach() * log_prob - value)).sum(-1).mean()
        plain.descend("actor", loss)

        surplus = (probability * log_prob).detach().sum(-1) + 0.4 * now["action_mask"][0].sum(-1).log()
        plain.descend("temperature", -(heat(plain, 1.0) * surplus).mean())
    (trained,) = learner.to_agents()
    plain.check(trained)


def without_draws(self, outputs, mask, generator):
    """Samples whose noise is the same for all agents, whatever stack they are in."""
    noise = torch.randn(outputs["action"].shape[1:], generator=torch.Generator().manual_seed(3))
    return outputs["action"] + outputs["log_scale"].exp() * noise


@pytest.mark.parametrize(
    ("actions", "settings"),
    [(BOX, ""), (BOX, "state_dependent_noise: {}"), (CHOICE, "")],
    ids=["box", "state-dependent noise", "choice"],
)
def test_stacks_learn_as_their_agents_do_alone(actions, settings, monkeypatch):
    monkeypatch.setattr(SquashedGaussian, "sample", without_draws)
    sac = made(settings, actions=actions)
    check_family(sac, [replayed_batch(sac, 4, seed=seed) for seed in range(3)])


@pytest.mark.parametrize(("entropy", "rises"), [(5.0, True), (-20.0, False)])
def test_the_temperature_rises_where_the_entropy_is_below_its_target(entropy, rises):
    sac = made(f"target_entropy: {entropy}")
    learner = population([agent(id=id, dqn=sac) for id in range(2)], sac)
    (stack,) = learner.policy.stacks
    before = sac.log_temperature(stack).clone()
    learner.update(replayed_batch(sac, 2))
    change = sac.log_temperature(stack) - before
    # The first step of Adam has the learning rate's size.
    torch.testing.assert_close(change.abs().flatten(), torch.full((2,), 3e-4), rtol=1e-2, atol=0)
    assert (change > 0).all() == rises


@pytest.mark.parametrize(("log_scale", "entropy"), [(-8.0, 2.0), (4.0, -9.0)])
def test_a_policy_whose_scale_is_out_of_bounds_comes_back(log_scale, entropy):
    sac = made(f"learning_rate: 0.1, target_entropy: {entropy}, initial_temperature: 5")
    member = agent(dqn=sac)
    for name, value in member.tensors["actor"]["parameters"].items():
        value.fill_(log_scale if name == "log_scale.bias" else 0.0) if "log_scale" in name else None
    learner = population([member], sac)
    for seed in range(40):
        learner.update(replayed_batch(sac, 1, seed=seed))
    look = seen(torch.randn(1, 50, 5))
    found = learner.policy.stacks[0].networks["actor"](look)["log_scale"].detach().mean()
    assert abs(float(found) - log_scale) > 1, "it stayed where it was"
    assert (float(found) > log_scale) == (log_scale < 0)


@pytest.mark.parametrize(
    ("actions", "settings", "expected"),
    [
        (BOX, "", -2.0),
        (BOX, "target_entropy: -0.5", -0.5),
        (CHOICE, "", 0.98 * math.log(3)),
        (CHOICE, "target_entropy_share: 0.5", 0.5 * math.log(3)),
        (CHOICE, "target_entropy: 0.3", 0.3),
        (CHOICE, "target_entropy: 2", 0.98 * math.log(3)),
        (CHOICE, "target_entropy: 0.3, target_entropy_share: 0.2", 0.3),
    ],
)
def test_the_target_entropy_is_given_or_that_of_the_paper(actions, settings, expected):
    sac = made(settings, actions=actions)
    (stack,) = population([agent(id=0, dqn=sac), agent(id=1, dqn=sac)], sac).policy.stacks
    torch.testing.assert_close(sac.target_entropy(stack, None), torch.full((2, 1), expected))


@pytest.mark.parametrize("settings", ["", "target_entropy: 1.2"], ids=["share", "given"])
def test_forbidden_actions_do_not_count_in_the_target_entropy(settings):
    sac = made(f"learning_rate: 1e-2, {settings}", actions=gym.spaces.Discrete(6), masked=True)
    learner = population([agent(dqn=sac)], sac)
    (stack,) = learner.policy.stacks
    mask = torch.zeros(1, 8, 6, dtype=torch.bool)
    for state, allowed in enumerate((1, 2, 2, 2, 3, 3, 5, 6)):
        mask[0, state, :allowed] = True
    reached = 0.98 * mask.sum(-1).log()
    expected = reached if not settings else reached.clamp(max=1.2)
    torch.testing.assert_close(sac.target_entropy(stack, mask), expected)

    before = float(sac.log_temperature(stack))
    few = torch.tensor([True, True] + 4 * [False]).expand(1, 8, 6)
    for seed in range(100):
        batch = replayed_batch(sac, 1, seed=seed)
        batch.columns["action"] %= 2
        batch.observation["action_mask"] = batch.next_observation["action_mask"] = few
        learner.update(batch)
    # Two of six actions can be as random as the target asks; where it cannot be reached each step is one upwards.
    assert float(sac.log_temperature(stack)) - before < 0.5


@pytest.mark.parametrize("actions", [BOX, CHOICE], ids=["box", "choice"])
def test_actions_are_sampled_and_those_in_evaluation_are_not(actions):
    sac = made("exploration: {random_steps: 0}", actions=actions)
    policy = population([agent(dqn=sac)], sac).policy
    look, started = seen(torch.zeros(1, 5000, 5)), torch.zeros(1, 5000, dtype=torch.bool)
    outputs = policy.stacks[0].networks["actor"](look)
    sampled, best = (policy.act(look, started, policy.initial_state(5000), flag)[0].action[0] for flag in (False, True))
    assert torch.equal(best, best[:1].expand_as(best))
    if actions is CHOICE:
        assert (best == outputs["action"][0].argmax(-1)).all()
        shares = torch.bincount(sampled, minlength=3) / 5000
        torch.testing.assert_close(shares, outputs["action"][0, 0].softmax(-1), atol=0.03, rtol=0)
        return
    torch.testing.assert_close(best, CENTRE + HALF * torch.tanh(outputs["action"][0]))
    unclipped = torch.atanh(((sampled - CENTRE) / HALF).clamp(-1 + 1e-6, 1 - 1e-6))
    torch.testing.assert_close(unclipped.std(0), outputs["log_scale"][0, 0].exp(), rtol=0.1, atol=0)


def test_noise_that_is_asked_for_goes_on_from_step_to_step_beside_the_policys_own():
    sac = made("exploration: {noise: ornstein_uhlenbeck, scale: 0.05, reversion: 0.1, random_steps: 0}")
    member = agent(dqn=sac)
    for name in ("action", "log_scale"):
        member.tensors["actor"]["parameters"][f"{name}.weight"].zero_()
        member.tensors["actor"]["parameters"][f"{name}.bias"].fill_(0.0 if name == "action" else -5.0)
    policy = population([member], sac).policy
    look, started = seen(torch.zeros(1, 4000, 5)), torch.zeros(1, 4000, dtype=torch.bool)
    state, found = policy.initial_state(4000), []
    for _ in range(20):
        output, state = policy.act(look, started, state)
        found.append((output.action[0] - CENTRE) / HALF)
    expected = 0.05 * ((1 - 0.81**20) / (1 - 0.81)) ** 0.5
    torch.testing.assert_close(found[-1].std(0), torch.full((2,), expected), rtol=0.05, atol=0)
    assert np.corrcoef(found[-2][:, 0], found[-1][:, 0])[0, 1] > 0.85
    best = policy.act(look, started, state, deterministic=True)[0].action[0]
    torch.testing.assert_close(best, CENTRE.expand_as(best))


def test_first_choices_are_drawn_evenly_from_what_is_allowed():
    sac = made("exploration: {random_steps: 10}", actions=CHOICE, masked=True)
    member = agent(dqn=sac)
    member.tensors["actor"]["parameters"]["action.bias"][:] = torch.tensor([-9.0, 9.0, 0.0])
    policy = population([member], sac).policy
    look = seen(torch.zeros(1, 5000, 5)) | {"action_mask": torch.tensor([True, True, False]).expand(1, 5000, 3)}
    started = torch.zeros(1, 5000, dtype=torch.bool)
    action = policy.act(look, started, policy.initial_state(5000))[0].action[0]
    shares = torch.bincount(action, minlength=3) / 5000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.5, 0.0]), atol=0.03, rtol=0)
    policy.acted(np.array([10.0]))
    assert (policy.act(look, started, policy.initial_state(5000))[0].action == 1).all()
