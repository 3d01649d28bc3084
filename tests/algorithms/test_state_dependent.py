"""Noise that is a function of the state: its distribution, and how long it is held."""

import gymnasium as gym
import numpy as np
import torch
from helpers.replayed import deviation, features, perceptron
from helpers.support import agent, algorithm, population, seen

from evorl.algorithms.state_dependent import NOISE
from evorl.evolution import mutation as operations
from evorl.export.network import ActingAgent
from evorl.networks.parameters import importance

BOX = gym.spaces.Box(-2.0, 2.0, (2,))


def made(settings="", more="", **spaces):
    """SAC that acts by its policy from the start, with the noise."""
    setting = f"algorithm={{name: sac, exploration: {{random_steps: 0}}, {more} state_dependent_noise: {{{settings}}}}}"
    return algorithm(setting, **{"actions": BOX} | spaces)


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unclipped(learner, look, states, started=None):
    """Actions [T, P, E, A] before any bound, of agents that see the same look [P, E, ...] at every step."""
    policy, found = learner.policy, []
    state = policy.initial_state(look.shape[1]) if isinstance(states, int) else states
    for step in range(states if isinstance(states, int) else 1):
        starts = torch.full(look.shape[:2], step == 0) if started is None else started[step]
        output, state = policy.act(seen(look), starts, state)
        found.append(torch.atanh(output.action / 2))
    return torch.stack(found)


def test_noise_in_one_state_has_the_variance_of_the_likelihood():
    member = agent(dqn=(sac := made("initial_log_scale: -2.0")))
    learner = population([member], sac)
    look = drawn(1, 1, 5, dtype=torch.float32).expand(1, 20_000, 5)
    action = unclipped(learner, look, 1)[0, 0]
    p = member.tensors["actor"]["parameters"]
    z = features(p, look[0, :1])
    assert z.count_nonzero() > 3
    expected = deviation(z, p[f"{NOISE}.weight"], -2.0)[0]
    mean = perceptron(p, {"observation": look[0, :1]}, "action")[0]
    torch.testing.assert_close(action.mean(0), mean, rtol=0, atol=0.05 * expected.max().item())
    covariance = torch.cov(action.double().T)
    torch.testing.assert_close(covariance, expected.square().diag().double(), rtol=0.05, atol=2e-2 * covariance.max())


def test_noise_is_the_same_function_of_the_state_until_it_is_drawn_anew():
    sac = made("every: 4")
    learner = population([agent(id=0, dqn=sac), agent(id=1, dqn=sac)], sac)
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
    sac = made("every: null")
    look, started = drawn(1, 1, 5, dtype=torch.float32).expand(1, 2, 5), torch.zeros(90, 1, 2, dtype=torch.bool)
    started[80, 0, 1] = True
    action = unclipped(population([agent(dqn=sac)], sac), look, 90, started)[:, 0]
    torch.testing.assert_close(action[:, 0], action[:1, 0].expand(90, -1))
    assert not torch.isclose(action[79, 1], action[80, 1]).any()


def test_agents_of_other_widths_in_a_stack_explore_as_they_do_alone(monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", 10**9)
    chosen = made()
    members = [agent(id=id, dqn=chosen) for id in range(2)]
    operations.enlarge(members[1], chosen.networks, "actor", "hidden.1", 40, np.random.default_rng(0))
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


def test_features_that_are_added_have_the_first_scale_and_the_noise_keeps_no_unit():
    sac = made()
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


def test_agents_are_evaluated_and_exported_without_noise():
    chosen = made()
    member, look = agent(dqn=chosen), drawn(1, 7, 5, dtype=torch.float32)
    policy = population([member], chosen).policy
    starts = torch.ones(1, 7, dtype=torch.bool)
    best = policy.act(seen(look), starts, policy.initial_state(7), deterministic=True)[0].action[0]
    mean = perceptron(member.tensors["actor"]["parameters"], {"observation": look[0]}, "action")
    torch.testing.assert_close(best, 2 * torch.tanh(mean))
    exported = ActingAgent(member, chosen, gym.spaces.Box(-1.0, 1.0, (5,)))
    assert exported.inputs == ("observation",)
    torch.testing.assert_close(exported(look[0])[0].float(), best)
