"""Noise that is a function of the state: its distribution, its gradients, how long it is held, and who takes it."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.replayed import Single, check_stack_equals_singles, generator, perceptron, replayed_batch
from helpers.support import agent, algorithm, batch_of, config, play_as_actor, population, seen
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from evorl.actors.collectors import MESSAGE_TYPES
from evorl.algorithms import make_algorithm
from evorl.algorithms.state_dependent import NOISE, StateDependentDistribution, StateDependentNoise
from evorl.algorithms.state_dependent import StateDependentNoiseSettings as Settings
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
from evorl.evolution import mutation as operations
from evorl.export.network import ActingAgent
from evorl.networks.distributions import Gaussian, SquashedGaussian
from evorl.networks.flat import Weights
from evorl.networks.parameters import importance
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import FEATURES
from evorl.types.outcomes import UserError

BOX = gym.spaces.Box(-2.0, 2.0, (2,))
P, B, N, A = 2, 6, 5, 3


def made(name, settings="", more="", **spaces):
    """An algorithm that acts by its policy from the start, with the noise."""
    first = {"a2c": "", "ppo": "", "sac": "exploration: {random_steps: 0}, "}
    first = first.get(name, "exploration: {noise: none, random_steps: 0}, ")
    setting = f"algorithm={{name: {name}, {first}{more} state_dependent_noise: {{{settings}}}}}"
    return algorithm(setting, **{"actions": BOX} | spaces)


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def features(p, observation, copy=None):
    """What the last of two hidden layers gives."""
    own = {name: value if copy is None else value[copy] for name, value in p.items() if name.startswith("hidden")}
    x = torch.relu(observation @ own["hidden.0.weight.observation"] + own["hidden.0.bias"])
    return torch.relu(x @ own["hidden.1.weight"] + own["hidden.1.bias"])


def deviation(z, offset, initial):
    """The standard deviation of theta^T z, written as in the paper."""
    return (z.square() @ (offset + initial).exp().square() + 1e-6).sqrt()


@pytest.mark.parametrize("base", [Gaussian, SquashedGaussian])
def test_likelihoods_and_their_gradients_are_those_of_a_gaussian_with_this_variance(base):
    distribution = StateDependentDistribution(
        base(gym.spaces.Box(-1.0, 1.0, (A,))), StateDependentNoise(Settings(initial_log_scale=-1.0), A, learned=True)
    )
    outputs = {"action": drawn(P, B, A), FEATURES: drawn(P, B, N, seed=1), NOISE: 0.3 * drawn(P, N, A, seed=2)}
    leaves = {name: value.requires_grad_() for name, value in outputs.items()}
    scale = deviation(outputs[FEATURES], outputs[NOISE], -1.0)
    assert 0.1 < scale.min() < scale.max() < 5.0
    unclipped = (outputs["action"] + scale * drawn(P, B, A, seed=3)).detach()
    normal = Independent(Normal(outputs["action"], scale), 1)
    expected = normal.log_prob(unclipped)
    if base is SquashedGaussian:
        tanh = TanhTransform(cache_size=1)
        expected = TransformedDistribution(Normal(outputs["action"], scale), tanh).log_prob(tanh(unclipped)).sum(-1)
    found = distribution.likelihood(leaves, None, unclipped)
    torch.testing.assert_close(found.log_prob, expected)
    torch.testing.assert_close(distribution.log_prob(leaves, None, unclipped), expected)
    if base is Gaussian:
        torch.testing.assert_close(found.entropy, normal.entropy())

    by_log_prob, by_entropy = drawn(P, B, seed=4), drawn(P, B, seed=5)
    entropy = normal.entropy() if base is Gaussian else found.entropy
    total = (by_log_prob * expected + by_entropy * entropy).sum()
    wanted = torch.autograd.grad(total, [leaves["action"], leaves[NOISE]], retain_graph=True)
    own = (by_log_prob * found.log_prob + by_entropy * found.entropy).sum()
    names = "action", NOISE, FEATURES
    *gradients, of_features = torch.autograd.grad(own, [leaves[name] for name in names], allow_unused=True)
    assert of_features is None, "features are trained by the mean alone"
    torch.testing.assert_close(gradients, list(wanted))


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a2c_learns_the_noise_by_the_policy_gradient(critic):
    a2c = made("a2c", "initial_log_scale: -1.0", f"critic: {critic}, entropy_coefficient: 0.2,")
    member = agent(dqn=a2c)
    learner = population([member], a2c)
    (stack,), copy = learner.policy.stacks, None if critic == "shared" else 0
    look = drawn(1, B, 5, dtype=torch.float32)
    fields = {"observation.observation": look, "next_observation.observation": look}
    columns = ("advantage", "return", "value")
    fields |= {name: drawn(1, B, seed=seed, dtype=torch.float32) for seed, name in enumerate(columns)}
    fields["unclipped_action"] = drawn(1, B, 2, seed=4, dtype=torch.float32)
    batch = batch_of(fields, torch.full((1, B), 1 / B), torch.ones(1))
    network, loss = stack.networks["policy"], a2c.loss(stack, batch, generator())
    found = Weights(network.gradient(loss.per_sample, batch.weight), network.weights.shapes, {})

    p = {name: value.clone().requires_grad_() for name, value in member.tensors["policy"]["parameters"].items()}
    scale = deviation(features(p, look[0], copy).detach(), p[f"{NOISE}.weight"], -1.0)
    mean = perceptron(p, {"observation": look[0]}, "action", copy)
    value = perceptron(p, {"observation": look[0]}, "value", None if copy is None else 1).squeeze(-1)
    policy = Independent(Normal(mean, scale), 1)
    expected = -policy.log_prob(fields["unclipped_action"][0]) * fields["advantage"][0] - 0.2 * policy.entropy()
    expected = expected + 0.5 * 0.5 * (value - fields["return"][0]).square()
    torch.testing.assert_close(loss.per_sample[0], expected.detach())
    expected.mean().backward()
    for name, value in p.items():
        flat = found[name].reshape(-1, found[name].shape[-1])
        rows = value.grad.reshape(-1, value.shape[-1])
        if "hidden" not in name:  # Hidden layers are padded.
            torch.testing.assert_close(flat[: len(rows), : rows.shape[1]], rows, rtol=1e-4, atol=1e-6)
    first = found["hidden.0.bias"][0 if copy is None else copy, :, :16]
    expected = p["hidden.0.bias"].grad if copy is None else p["hidden.0.bias"].grad[copy]
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-6)


def test_sac_learns_as_the_paper_says():
    """Gradients flow through the features as well; samples are independent."""
    sac = made("sac", "initial_log_scale: -1.5", "tau: 0.1, initial_temperature: 0.5, target_entropy: -0.7,")
    single = agent(dqn=sac)
    learner, plain, draws = population([single], sac), Single(single), generator()

    def sampled(observation):
        p = plain.p["actor"]
        scale = deviation(features(p, observation), p[f"{NOISE}.weight"], -1.5).clamp(np.exp(-5), np.exp(2))
        mean = perceptron(p, {"observation": observation}, "action")
        action = torch.tanh(mean + scale * torch.randn(1, 8, 2, generator=draws)[0])
        policy = TransformedDistribution(Normal(mean, scale), TanhTransform(cache_size=1))
        return action, policy.log_prob(action).sum(-1)

    def values(p, observation, action):
        parts = {"observation": observation, "action": action}
        return [perceptron(p, parts, head, copy).squeeze(-1) for copy, head in enumerate(("first", "second"))]

    for update in range(4):
        batch = replayed_batch(sac, 1, seed=update)
        learner.update(batch)
        now, following = batch.observation["observation"][0], batch.next_observation["observation"][0]
        heat = plain.p["temperature"]["log_temperature.bias"].squeeze() + np.log(0.5)
        with torch.no_grad():
            action, log_prob = sampled(following)
            value = torch.minimum(*values(plain.target["critics"], following, action)) - heat.exp() * log_prob
            target = batch.columns["reward"][0] + 0.99 * ~batch.columns["terminated"][0] * value
        first, second = values(plain.p["critics"], now, batch.columns["action"][0] / 2)
        plain.descend("critics", (first - target).square().mean() + (second - target).square().mean())
        plain.follow("critics")
        action, log_prob = sampled(now)
        value = torch.minimum(*values(plain.p["critics"], now, action))
        plain.descend("actor", (heat.exp().detach() * log_prob - value).mean())
        plain.descend("temperature", -(heat * (log_prob.detach() - 0.7)).mean())
    (trained,) = learner.to_agents()
    plain.check(trained)
    moved = (
        trained.tensors["actor"]["parameters"][f"{NOISE}.weight"]
        - single.tensors["actor"]["parameters"][f"{NOISE}.weight"]
    )
    assert moved.abs().max() > 1e-4


def unclipped(learner, look, states, started=None):
    """Actions [T, P, E, A] before any bound, of agents that see the same look [P, E, ...] at every step."""
    policy, found = learner.policy, []
    state = policy.initial_state(look.shape[1]) if isinstance(states, int) else states
    for step in range(states if isinstance(states, int) else 1):
        starts = torch.full(look.shape[:2], step == 0) if started is None else started[step]
        output, state = policy.act(seen(look), starts, state)
        action = output.extras.get("unclipped_action")
        found.append(torch.atanh(output.action / 2) if action is None else action)
    return torch.stack(found)


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_noise_in_one_state_has_the_variance_of_the_likelihood(name):
    member = agent(dqn=(made_one := made(name, "initial_log_scale: -2.0")))
    learner = population([member], made_one)
    look = drawn(1, 1, 5, dtype=torch.float32).expand(1, 20_000, 5)
    action = unclipped(learner, look, 1)[0, 0]
    p, copy = next(iter(member.tensors.values()))["parameters"], None if name == "sac" else 0
    z = features(p, look[0, :1], copy)
    assert z.count_nonzero() > 3
    expected = deviation(z, p[f"{NOISE}.weight"], -2.0)[0]
    mean = perceptron(p, {"observation": look[0, :1]}, "action", copy)[0]
    torch.testing.assert_close(action.mean(0), mean, rtol=0, atol=0.05 * expected.max().item())
    covariance = torch.cov(action.double().T)
    torch.testing.assert_close(covariance, expected.square().diag().double(), rtol=0.05, atol=2e-2 * covariance.max())


def test_noise_is_the_same_function_of_the_state_until_it_is_drawn_anew():
    ppo = made("ppo", "every: 4")
    learner = population([agent(id=0, dqn=ppo), agent(id=1, dqn=ppo)], ppo)
    look = drawn(2, 1, 5, dtype=torch.float32).expand(2, 3_000, 5)
    started = torch.zeros(11, 2, 3_000, dtype=torch.bool)
    started[0] = started[2, 1, 1_000:] = True
    noise = unclipped(learner, look, 11, started)
    noise = noise - noise.mean((0, 2), keepdim=True)

    def correlation(step, member, envs):
        pair = noise[step - 1, member, envs, 0], noise[step, member, envs, 0]
        return float(np.corrcoef(*(each.numpy() for each in pair))[0, 1])

    for step in range(1, 11):
        for member, envs, anew in ((0, slice(None), (4, 8)), (1, slice(1_000, None), (2, 6, 10))):
            if step in anew:
                assert abs(correlation(step, member, envs)) < 0.08
            else:
                torch.testing.assert_close(noise[step, member, envs], noise[step - 1, member, envs])
    state = learner.policy.initial_state(3_000)
    assert state.shape == (2, 3_000, 3, 32), "two rows of a matrix and one of ages, of 16 features and their padding"
    other = unclipped(learner, look + 1.0, 1)
    assert not torch.allclose(other[0], noise[0]), "another state has other noise"


def test_noise_that_is_not_drawn_anew_ends_with_its_episode():
    ppo = made("ppo", "every: null")
    look, started = drawn(1, 1, 5, dtype=torch.float32).expand(1, 2, 5), torch.zeros(90, 1, 2, dtype=torch.bool)
    started[80, 0, 1] = True
    action = unclipped(population([agent(dqn=ppo)], ppo), look, 90, started)[:, 0]
    torch.testing.assert_close(action[:, 0], action[:1, 0].expand(90, -1))
    assert not torch.isclose(action[79, 1], action[80, 1]).any()


def test_deterministic_actors_add_noise_of_a_fixed_scale():
    td3 = made("td3", "initial_log_scale: -2.5")
    member = agent(dqn=td3)
    assert not any(NOISE in name for name in member.tensors["actor"]["parameters"])
    look = 0.3 * drawn(1, 1, 5, dtype=torch.float32).expand(1, 20_000, 5)
    learner = population([member], td3)
    state, starts = learner.policy.initial_state(20_000), torch.ones(1, 20_000, dtype=torch.bool)
    output, state = learner.policy.act(seen(look), starts, state)
    best, _ = learner.policy.act(seen(look), starts, state, deterministic=True)
    noise = (output.action - best.action)[0] / 2
    z = features(member.tensors["actor"]["parameters"], look[0, :1])
    expected = deviation(z, torch.zeros(16, 2), -2.5)[0]
    assert 0.01 < expected.max() < 0.2, "no action is at a bound"
    torch.testing.assert_close(noise.std(0), expected, rtol=0.03, atol=0)
    again, _ = learner.policy.act(seen(look), ~starts, state)
    torch.testing.assert_close(again.action, output.action)


@pytest.mark.parametrize("name", ["sac", "ppo", "ddpg"])
def test_agents_of_other_widths_in_a_stack_explore_as_they_do_alone(name, monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", 10**9)
    chosen = made(name)
    members = [agent(id=id, dqn=chosen) for id in range(2)]
    network, rng = next(iter(chosen.networks)), np.random.default_rng(0)
    operations.enlarge(members[1], chosen.networks, network, "hidden.1", 40, rng)
    together = population(members, chosen)
    assert len(together.policy.stacks) == 1
    look = drawn(2, 3, 5, dtype=torch.float32)
    state = drawn(*together.policy.initial_state(3).shape, dtype=torch.float32)
    state[:, :, -1] = 1.0
    going = torch.zeros(1, 2, 3, dtype=torch.bool)
    joint = unclipped(together, look, state, going)[0]
    assert joint.isfinite().all()
    for index, member in enumerate(members):
        alone, own = population([member], chosen), slice(index, index + 1)
        width = alone.policy.initial_state(3).shape[-1]
        assert width == (32, 48)[index]
        single = unclipped(alone, look[own], state[own, ..., :width].clone(), going[:, own])[0]
        torch.testing.assert_close(single[0], joint[index], rtol=1e-4, atol=1e-5)


def test_stacks_learn_as_their_agents_do_alone(monkeypatch):
    def same_for_all(self, outputs, mask, generator):
        noise = torch.randn(outputs["action"].shape[1:], generator=torch.Generator().manual_seed(3))
        return outputs["action"] + outputs["log_scale"].exp() * noise

    monkeypatch.setattr(SquashedGaussian, "sample", same_for_all)
    sac = made("sac")
    for overhead in (0, 10**9):
        monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
        check_stack_equals_singles(sac, [replayed_batch(sac, 4, seed=seed) for seed in range(2)])


def test_features_that_are_added_have_the_first_scale_and_the_noise_keeps_no_unit():
    sac = made("sac")
    member = agent(dqn=sac)
    before = member.tensors["actor"]["parameters"][f"{NOISE}.weight"].clone()
    operations.enlarge(member, sac.networks, "actor", "hidden.1", 24, np.random.default_rng(0))
    parameters = member.tensors["actor"]["parameters"]
    grown = parameters[f"{NOISE}.weight"]
    assert torch.equal(grown[:16], before)
    assert grown.shape == (24, 2)
    assert not grown[16:].any()
    specs = sac.networks["actor"].network.specs(member.architectures["actor"])
    torch.testing.assert_close(
        importance(specs, parameters, "hidden.1"), parameters["action.weight"].abs().sum(1), msg="of weights alone"
    )


@pytest.mark.parametrize("name", ["sac", "ppo", "td3"])
def test_agents_are_evaluated_and_exported_without_noise(name):
    chosen = made(name)
    member, look = agent(dqn=chosen), drawn(1, 7, 5, dtype=torch.float32)
    policy = population([member], chosen).policy
    starts = torch.ones(1, 7, dtype=torch.bool)
    best = policy.act(seen(look), starts, policy.initial_state(7), deterministic=True)[0].action[0]
    p, copy = next(iter(member.tensors.values()))["parameters"], 0 if name == "ppo" else None
    mean = perceptron(p, {"observation": look[0]}, "action", copy)
    torch.testing.assert_close(best, 2 * (mean.clamp(-1, 1) if name == "ppo" else torch.tanh(mean)))
    exported = ActingAgent(member, chosen, gym.spaces.Box(-1.0, 1.0, (5,)))
    assert exported.inputs == ("observation",)
    torch.testing.assert_close(exported(look[0])[0].float(), best)


@pytest.mark.parametrize("more", ["name: impala", "name: a3c", "name: apex_ddpg, exploration: {noise: none}"])
def test_actors_explore_by_it_and_send_none_of_it(more):
    settings = config(
        "environment.id=Pendulum-v1",
        f"algorithm={{{more}, rollout_steps: 4, state_dependent_noise: {{every: 3}}}}",
        *(["replay={capacity: 500, learning_starts: 16, prioritised: {}}"] if "apex" in more else []),
    )
    environments = Environments(settings.environment, 1, 2)
    chosen = make_algorithm(settings, environments.interface)
    member = agent(dqn=chosen)
    learner = population([member], chosen)
    message = MESSAGE_TYPES[settings.algorithm.actor_messages].layout(learner.policy, settings)(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    assert "a3c" in more or message.layout.state == (0, 0)
    experience = chosen.experience(Placement(Ranks(), "replicated", 1), environments.always_valid, Stopwatch())
    environments.reset(1)
    play_as_actor(learner, experience, environments, 24)
    environments.close()
    (trained,) = learner.to_agents()
    assert trained.fault is None
    network = next(iter(chosen.networks))
    before, after = (each.tensors[network]["parameters"].get(f"{NOISE}.weight") for each in (member, trained))
    assert before is None or not torch.equal(before, after)


@pytest.mark.parametrize("name", ["a2c", "ppo", "sac"])
def test_choices_take_no_such_noise(name):
    with pytest.raises(UserError, match=r"state_dependent_noise: is for a Box, and Some-v0 has Discrete\(3\)"):
        made(name, actions=gym.spaces.Discrete(3))


def test_networks_with_a_state_take_no_such_noise():
    setting = "algorithm={name: ppo, state_dependent_noise: {}}"
    with pytest.raises(UserError, match=r"leave it or network.recurrent=gru out"):
        algorithm(setting, "network.recurrent=gru", actions=BOX)


def test_modules_do_not_show_their_features():
    module = "network={name: module, factory: 'helpers.support:probe_network'}"
    with pytest.raises(UserError, match=r"or use network.name=standard"):
        algorithm("algorithm={name: ppo, state_dependent_noise: {}}", module, actions=BOX)
