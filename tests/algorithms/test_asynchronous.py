"""The losses of IMPALA, APPO and A3C: what they share with A2C and PPO, and what each adds."""

import dataclasses
import math

import pytest
import torch
from helpers.kinds import made, rollout_batch
from helpers.support import agent, population

from evorl.algorithms.asynchronous import flattened
from evorl.population.learner import compute_gradients, read_state, state_size, write_state
from evorl.types.outcomes import UserError

T, S = 4, 3


def algorithm(name, *overrides):
    return made(name, f"algorithm.rollout_steps={T}", "algorithm.sequence_length=null", *overrides)


def learner_of(chosen, **hyperparameters):
    """Two agents of an algorithm that learn, the second of whom is wider."""
    agents = [agent(id=id, dqn=chosen, **hyperparameters) for id in range(2)]
    return population(agents, chosen), agents


def trajectories(chosen, agents, learner):
    """A batch [P, T * S] as actors send it, of the learner's own policy, with some ends of episodes."""
    batch = rollout_batch(chosen, agents, size=S, length=T)
    (stack,) = learner.policy.stacks
    with torch.no_grad():
        outputs = stack.networks["policy"](batch.observation, batch.recurrent)
        action = batch.columns["unclipped_action"]
        log_prob = chosen.distribution.log_prob(outputs, batch.observation.get("action_mask"), action)
    generator = torch.Generator().manual_seed(5)
    shape = log_prob.shape
    draws = torch.rand(2, *shape, generator=generator)
    columns = {
        "unclipped_action": action, "log_prob": log_prob, "value": outputs["value"].squeeze(-1),
        "reward": torch.randn(shape, generator=generator), "next_value": torch.randn(shape, generator=generator),
        "terminated": draws[0] < 0.1, "truncated": draws[0] > 0.9, "valid": draws[1] < 0.95,
        "entropy_scale": torch.ones(shape),
    }  # fmt: skip
    return dataclasses.replace(batch, columns=columns), stack, outputs


def with_batch_targets(chosen, batch, stack):
    return dataclasses.replace(batch, columns={**batch.columns, **chosen.batch_targets(stack, batch)})


def learnable(chosen, agents, learner):
    """Such a batch with the targets of A3C."""
    batch, stack, _ = trajectories(chosen, agents, learner)
    return with_batch_targets(chosen, batch, stack)


def with_targets(chosen, batch, stack, outputs):
    batch = with_batch_targets(chosen, batch, stack)
    likelihood = chosen.distribution.likelihood(outputs, None, batch.columns["unclipped_action"])
    return chosen.with_targets(stack, batch, likelihood, outputs["value"].squeeze(-1)).columns


@pytest.mark.parametrize("trace", [1.0, 0.9])
def test_on_policy_impala_and_a3c_learn_what_a2c_does(trace):
    impala, a3c, a2c = algorithm("impala"), algorithm("a3c_data_parallel"), made("a2c")
    learner, agents = learner_of(impala, gae_lambda=trace)
    batch, stack, outputs = trajectories(impala, agents, learner)
    found, samples = (with_targets(chosen, batch, stack, outputs) for chosen in (impala, a3c))
    expected = a2c.targets(impala.segment(batch.columns), stack.hyperparameters)
    for name in ("advantage", "return"):
        torch.testing.assert_close(samples[name], flattened(expected[name]))
        torch.testing.assert_close(found[name], flattened(expected[name]))
    nothing = ~batch.columns["valid"]
    assert found["advantage"][nothing].abs().max() < 1e-6


def test_off_policy_impala_weighs_and_cuts():
    impala = algorithm("impala")
    learner, agents = learner_of(impala)
    batch, stack, outputs = trajectories(impala, agents, learner)
    batch.columns["valid"][:] = True
    rare = dict(batch.columns, log_prob=batch.columns["log_prob"] + math.log(4))
    often = dict(batch.columns, log_prob=batch.columns["log_prob"] - math.log(4))
    usual, less, more = (
        with_targets(impala, dataclasses.replace(batch, columns=columns), stack, outputs)
        for columns in (batch.columns, rare, often)
    )
    last = slice(-S, None)
    torch.testing.assert_close(less["advantage"][:, last], usual["advantage"][:, last] / 4)
    torch.testing.assert_close(more["advantage"], usual["advantage"], rtol=1e-4, atol=1e-5)


def test_importance_weights_do_not_make_a_signal_of_equal_advantages():
    """Normalised after they are weighted, equal advantages would differ, and prefer what has become more likely."""
    impala = algorithm("impala", "algorithm.normalize_advantage=true")
    learner, agents = learner_of(impala, gae_lambda=0.0, gamma=0.0)
    batch, stack, outputs = trajectories(impala, agents, learner)
    columns = dict(batch.columns, log_prob=batch.columns["log_prob"] + torch.rand(batch.columns["log_prob"].shape))
    columns["reward"] = outputs["value"].squeeze(-1).detach() + 0.5
    columns["valid"] = torch.ones_like(columns["valid"])
    targets = with_targets(impala, dataclasses.replace(batch, columns=columns), stack, outputs)
    assert targets["advantage"].abs().max() < 0.1


def test_appo_values_actions_by_the_target_network_and_not_by_the_policy():
    appo = algorithm("appo")
    learner, agents = learner_of(appo)
    batch, stack, outputs = trajectories(appo, agents, learner)
    target = stack.target_networks["policy"](batch.observation)
    action = batch.columns["unclipped_action"]
    expected = appo.distribution.log_prob(target, None, action) - batch.columns["log_prob"]
    found = with_targets(appo, batch, stack, outputs)["log_ratio"]
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 1e-3, "agents are meant to have targets of their own"
    # What earlier passes over a batch have done to the policy's values leaves its advantages as they were.
    fitted = {**outputs, "value": outputs["value"] + torch.randn_like(outputs["value"])}
    before, after = (with_targets(appo, batch, stack, given) for given in (outputs, fitted))
    for name in ("advantage", "return"):
        torch.testing.assert_close(after[name], before[name])


def test_an_actor_has_its_own_share_of_the_entropy():
    chosen = algorithm("a3c_data_parallel", "algorithm.entropy_scales=[1, 3]")
    assert [chosen.actor_state(index, 4)["entropy_scale"].item() for index in range(4)] == [1, 3, 1, 3]
    assert chosen.initial_state() == {"steps": 0.0, "entropy_scale": 1.0}
    learner, agents = learner_of(chosen)
    batch, stack, _ = trajectories(chosen, agents, learner)
    generator = torch.Generator()
    losses = []
    for scale in (1.0, 3.0):
        columns = dict(batch.columns, entropy_scale=torch.full_like(batch.columns["value"], scale))
        columns |= chosen.batch_targets(stack, batch)
        losses.append(chosen.loss(stack, dataclasses.replace(batch, columns=columns), generator))
    entropy = losses[0].metrics()["entropy"]
    coefficient = stack.hyperparameters["entropy_coefficient"].unsqueeze(-1)
    torch.testing.assert_close(losses[0].per_sample - losses[1].per_sample, 2 * coefficient * entropy)


def test_a_gradient_that_an_actor_computed_makes_the_same_update():
    chosen = algorithm("a3c")
    at_once, agents = learner_of(chosen)
    sent, _ = learner_of(chosen)
    actor, _ = learner_of(chosen)
    for _ in range(2):
        batch = learnable(chosen, agents, at_once)
        actor.policy.flat.copy_(sent.policy.flat)
        at_once.update(batch)
        sent.update(compute_gradients(actor, batch))
    assert not at_once.policy.flat.equal(population(agents, chosen).policy.flat)
    torch.testing.assert_close(at_once.policy.flat, sent.policy.flat, rtol=0, atol=0)
    ours, theirs = at_once.metrics(), sent.metrics()
    for name, values in ours.sums.items():
        torch.testing.assert_close(torch.from_numpy(values), torch.from_numpy(theirs.sums[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("scale", "fault"), [(1e3, None), (1e12, "gradient norm"), (1e20, "loss and gradient norm")])
def test_an_actor_does_not_clip_a_gradient_that_overflows_to_0(scale, fault):
    """Agent 1 has hidden units 1e8 times as large, outputs as large as before, and rewards `scale` times as large."""
    chosen = algorithm("a3c", "algorithm.max_grad_norm=0.5")
    _, members = learner_of(chosen)
    for name, value in members[1].tensors["policy"]["parameters"].items():
        value *= {"hidden.0": 1e8, "hidden.1": 1.0}.get(name[:8], 1e-8)
    actor, learner = population(members, chosen), population(members, chosen)
    batch, stack, _ = trajectories(chosen, members, actor)
    batch.columns["reward"][1] *= scale
    learner.update(compute_gradients(actor, with_batch_targets(chosen, batch, stack)))
    assert [each.fault for each in learner.to_agents()] == [None, fault and f"{fault} not finite at update 1"]


def test_a_learner_that_takes_over_another_ones_state_goes_on_as_it_would():
    chosen = algorithm("a3c_shared")
    first, agents = learner_of(chosen)
    second, _ = learner_of(chosen)
    for _ in range(3):
        first.update(learnable(chosen, agents, first))
    flat, updates = torch.full((state_size(first),), torch.nan), torch.zeros(1, 2, dtype=torch.float64)
    write_state(first, flat, updates)
    read_state(second, flat, updates)
    batch = learnable(chosen, agents, first)
    for each in (first, second):
        each.update(batch)
    assert first.policy.flat.equal(second.policy.flat)
    for ours, theirs in zip(first.to_agents(), second.to_agents(), strict=True):
        assert ours.state.updates == theirs.state.updates == {"policy": 4.0}
        torch.testing.assert_close(ours.tensors, theirs.tensors, rtol=0, atol=0)


def test_ranks_that_hold_the_same_agents_cannot_share_memory():
    with pytest.raises(UserError, match=r"population.placement: actors of a3c_shared .* 2 ranks .*=sharded"):
        algorithm("a3c_shared").check_copies(2)


def test_appos_target_is_copied_after_so_many_batches():
    appo = algorithm("appo", "algorithm.passes=2", "algorithm.minibatches=3", "algorithm.target_period=2")
    updates = torch.arange(1.0, 25.0, dtype=torch.float64)
    rates = appo.target_rule.rate({"target_period": torch.tensor(2.0)}, updates)
    assert updates[rates > 0].tolist() == [12, 24]


def test_a_message_of_averaged_gradients_has_the_steps_of_all_their_rollouts():
    """T = 4 steps of a rollout, of which an actor averages 3."""
    assert algorithm("a3c", "algorithm.grad_sync_steps=3").settings.sent_steps == 12
