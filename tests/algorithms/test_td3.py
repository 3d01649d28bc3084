"""TD3 against one agent that is written plainly."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.replayed import Single, check_family, generator, perceptron, replayed_batch, twin_values
from helpers.support import agent, algorithm, config, kept, learning, play, population, seen

ACTIONS = gym.spaces.Box(np.array([0.0, -2.0], np.float32), np.array([4.0, 2.0], np.float32))
CENTRE, HALF = torch.tensor([2.0, 0.0]), torch.tensor([2.0, 2.0])


def made(settings="", **spaces):
    return algorithm(f"algorithm={{name: td3, {settings}}}", **{"actions": ACTIONS} | spaces)


def test_an_agent_learns_as_the_paper_says():
    td3 = made("policy_delay: 3, target_noise: 0.6, target_noise_clip: 0.4, actor_learning_rate: 5e-3, tau: 0.1")
    single = agent(dqn=td3, gamma=0.9)
    for role in ("parameters", "target"):
        single.tensors["actor"][role]["action.bias"] += 1.5  # So that noise comes to the bounds.
    learner, plain, draws = population([single], td3), Single(single), generator()
    clipped = cut = 0
    for update in range(1, 8):
        batch = replayed_batch(td3, 1, seed=update)
        errors = learner.update(batch).errors

        seen, following = batch.observation["observation"][0], batch.next_observation["observation"][0]
        noise = 0.6 * torch.randn(1, 8, 2, generator=draws)[0]
        clipped += int((noise.abs() > 0.4).sum())
        smoothed = torch.tanh(perceptron(plain.target["actor"], {"observation": following}, "action"))
        smoothed = smoothed + noise.clamp(-0.4, 0.4)
        cut += int((smoothed.abs() > 1).sum())
        first, second = twin_values(plain.target["critics"], following, smoothed.clamp(-1, 1))
        goes_on = 1 - batch.columns["terminated"][0].float()
        target = batch.columns["reward"][0] + 0.9 * goes_on * torch.minimum(first, second)
        done = (batch.columns["action"][0] - CENTRE) / HALF
        first, second = twin_values(plain.p["critics"], seen, done)
        expected = ((first - target).abs() + (second - target).abs()) / 2
        torch.testing.assert_close(errors[0], expected.detach(), rtol=1e-4, atol=1e-5)
        plain.descend("critics", (first - target).square().mean() + (second - target).square().mean())
        if update % 3 == 1:  # The first update of a generation is one of the actor and of all targets.
            plain.follow("critics")
            action = torch.tanh(perceptron(plain.p["actor"], {"observation": seen}, "action"))
            plain.descend("actor", -twin_values(plain.p["critics"], seen, action)[0].mean())
            plain.follow("actor")
    assert clipped
    assert cut
    (trained,) = learner.to_agents()
    plain.check(trained)
    assert trained.state.updates == {"actor": 3, "critics": 7}


@pytest.mark.parametrize("kernel", ["auto", "false"])
def test_the_actor_learns_from_the_first_critic_alone(kernel):
    td3 = algorithm("algorithm={name: td3}", f"run.kernel={kernel}", actions=ACTIONS)
    gradients = []
    for second in (1.0, np.nan):
        single = agent(dqn=td3)
        for name, values in single.tensors["critics"]["parameters"].items():
            if not name.startswith("first"):
                (values if name.startswith("second") else values[1]).mul_(second)
        learner = population([single], td3)
        learner.losses(td3.objectives[1], [replayed_batch(td3, 1)])
        gradients.append(learner.gradients["actor"].clone())
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_stacks_learn_as_their_agents_do_alone():
    td3 = made("target_noise: 0, policy_delay: 2")
    check_family(td3, [replayed_batch(td3, 4, seed=seed) for seed in range(4)])


def some_due(td3, update):
    """A batch of three agents of which one learns in each update, one in every second and one in every third."""
    batch = replayed_batch(td3, 3, seed=update)
    batch.due = torch.tensor([1.0, float(update % 2), float(update % 3 == 1)])
    return batch


@pytest.mark.parametrize("delay", [2, 3])
@pytest.mark.parametrize("overhead", [0, 10**9], ids=["stacks of one", "one stack"])
def test_each_agents_delay_is_counted_by_its_own_updates(delay, overhead, monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
    td3 = made(f"target_noise: 0, policy_delay: {delay}, tau: 0.1")
    agents = [agent(id=id, dqn=td3) for id in range(3)]
    together, alone = population(agents, td3), [population([each], td3) for each in agents]
    for update in range(12):
        batch = some_due(td3, update)
        together.update(batch)
        for index, learner in enumerate(alone):
            if batch.due[index]:
                own = batch.part(slice(index, index + 1))
                own.all_due = True
                learner.update(own)
    for found, learner, count in zip(together.to_agents(), alone, (12, 6, 4), strict=True):
        (expected,) = learner.to_agents()
        assert found.state.updates == expected.state.updates == {"critics": count, "actor": -(-count // delay)}
        torch.testing.assert_close(found.tensors, expected.tensors, rtol=1e-4, atol=1e-6)


def test_a_delayed_step_that_no_agent_takes_is_not_computed():
    """Once agents count their own updates: those of the first come in updates 0, 2, 4, of the second in 1 and 5."""
    td3 = made("target_noise: 0, policy_delay: 2")
    learner, steps = population([agent(id=id, dqn=td3) for id in range(2)], td3), []
    (actor_loss,) = [each.loss for each in td3.objectives if each.network == "actor"]
    td3.objectives[1] = replace(td3.objectives[1], loss=lambda *given: steps.append(update) or actor_loss(*given))
    for update in range(6):
        batch = replayed_batch(td3, 2, seed=update)
        batch.due = torch.tensor([1.0, float(update % 2)])
        batch.all_due = False
        learner.update(batch)
    assert steps == [0, 1, 2, 4, 5]
    assert [each.state.updates["actor"] for each in learner.to_agents()] == [3, 2]


def test_the_delay_goes_on_where_a_checkpoint_was_made():
    td3 = made("target_noise: 0, policy_delay: 3, tau: 0.1")
    whole = population([agent(id=id, dqn=td3) for id in range(3)], td3)
    learner = population(whole.policy.agents, td3)
    for update in range(10):
        whole.update(some_due(td3, update))
        learner.update(some_due(td3, update))
        learner = population(learner.to_agents(), td3)
    assert torch.equal(learner.policy.flat, whole.policy.flat)
    assert [each.state for each in learner.to_agents()] == [each.state for each in whole.to_agents()]


def test_an_agent_that_is_stopped_in_a_delayed_step_stays_out_of_later_ones():
    td3 = made("target_noise: 0")
    agents = [agent(id=id, dqn=td3) for id in range(2)]
    learner = population(agents, td3)
    batch = replayed_batch(td3, 2)
    (actor_loss,) = [each.loss for each in td3.objectives if each.network == "actor"]

    def broken(stack, batch, generator):
        loss = actor_loss(stack, batch, generator)
        loss.per_sample = loss.per_sample * torch.tensor([[1.0], [float("nan")]])
        return loss

    td3.objectives[1] = replace(td3.objectives[1], loss=broken)
    assert learner.update(batch).active.tolist() == [1.0, 0.0]
    learner.update(batch)
    good, bad = learner.to_agents()
    assert (good.state.updates, good.fault) == ({"critics": 2, "actor": 1}, None)
    assert (bad.state.updates, bad.fault) == (
        {"critics": 1, "actor": 0},
        "loss and gradient norm not finite at update 1",
    )


def test_each_agent_smooths_by_its_own_noise():
    td3 = made()
    stds = (0.0, 0.1, 0.3)
    agents = [agent(id=id, dqn=td3, target_noise=std, target_noise_clip=5.0) for id, std in enumerate(stds)]
    (stack,) = population(agents, td3).policy.stacks
    look = seen(torch.zeros(3, 20_000, 5))
    exact = torch.tanh(stack.target_networks["actor"](look)["action"])
    noise = td3.target_action(stack, look, torch.Generator().manual_seed(0)) - exact
    torch.testing.assert_close(noise.std((1, 2)), torch.tensor(stds), atol=0.01, rtol=0)


def acting(td3, member, deterministic=False):
    """Actions [E, A] of one agent that sees the same everywhere, and what it would do best."""
    policy = population([member], td3).policy
    look, started = seen(torch.zeros(1, 20_000, 5)), torch.zeros(1, 20_000, dtype=torch.bool)
    action = policy.act(look, started, policy.initial_state(20_000), deterministic)[0].action[0]
    best = CENTRE + HALF * torch.tanh(policy.stacks[0].networks["actor"](look)["action"][0])
    return (action - CENTRE) / HALF, (best - CENTRE) / HALF


def test_agents_explore_with_gaussian_noise_and_not_when_they_are_evaluated():
    td3 = made("exploration: {scale: 0.05, random_steps: 0}")
    member = agent(dqn=td3)
    assert not population([agent(dqn=td3)], td3).policy.initial_state(2).numel(), "what is fresh needs no state"
    action, best = acting(td3, member)
    torch.testing.assert_close((action - best).std(0), torch.tensor([0.05, 0.05]), atol=0.002, rtol=0)
    torch.testing.assert_close((action - best).mean(0), torch.zeros(2), atol=0.002, rtol=0)
    action, best = acting(td3, member, deterministic=True)
    torch.testing.assert_close(action, best)


def test_first_actions_are_drawn_evenly_and_those_of_ancestors_count():
    td3 = made("exploration: {scale: 0.0, random_steps: 100}")
    member = agent(dqn=td3)
    action, best = acting(td3, member)
    torch.testing.assert_close(action.std(0), torch.full((2,), 1 / 3**0.5), atol=0.01, rtol=0)
    assert action.abs().max() <= 1
    torch.testing.assert_close(acting(td3, member, deterministic=True)[0], best)
    learner = population([member], td3)
    learner.policy.acted(np.array([100.0]))
    (experienced,) = learner.to_agents()
    action, best = acting(td3, experienced.child(1))
    torch.testing.assert_close(action, best)


@pytest.mark.parametrize("name", ["td3", "ddpg"])
@pytest.mark.parametrize("replay", ["{n_step: 3, prioritised: {}}", "{shared: false}"])
def test_every_replay_keeps_the_environments_actions_and_is_learned_from(name, replay):
    settings = config(
        "environment={id: Pendulum-v1, num_envs: 2}", "population.size=2", f"replay={replay}", "replay.capacity=200",
        "replay.learning_starts=20", f"algorithm={{name: {name}, batch_size: 4}}",
    )  # fmt: skip
    learner, experience, environments = learning(settings)
    play(learner, experience, environments, 30)
    actions = kept(experience.storage)["action"]
    assert actions.shape == (120, 1)
    assert 1.8 < actions.abs().max() <= 2.0, "first actions are random"
    before = {name: network.parameters.flat.clone() for name, network in learner.policy.stacks[0].networks.items()}
    play(learner, experience, environments, 5)
    for name, network in learner.policy.stacks[0].networks.items():
        assert not torch.equal(network.parameters.flat, before[name])
    assert not any(member.fault for member in learner.to_agents())
