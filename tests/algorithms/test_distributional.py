"""DQN that learns distributions of returns: losses by hand, stacks by single agents, probes, warnings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.dqns import DQNS, same_noise
from helpers.support import (
    agent,
    algorithm,
    batch,
    check_stacks_equal_singles,
    config,
    first_architecture,
    population,
    seen,
    train,
    trained,
)

from evorl.algorithms.functional import categorical_projection, cross_entropy, quantile_huber
from evorl.algorithms.values import MeanValues
from evorl.config.off_policy import DQNSettings
from evorl.networks.stack import WeightNoise
from evorl.types.outcomes import EvorlWarning


def family(dqn, count=3):
    shape = first_architecture(dqn)
    sizes = ((16, 16), (48, 20), (5, 33))
    return [
        agent(replace(shape, hidden_sizes=sizes[i]), id=i, dqn=dqn, gamma=0.5 + 0.2 * i, learning_rate=1e-3 * (i + 1))
        for i in range(count)
    ]


def masked_batch(agents, seed=0):
    """Transitions of several steps with masks."""
    some, generator = batch(agents, seed=seed), torch.Generator().manual_seed(seed)
    mask = torch.rand(len(agents), 8, 3, generator=generator) < 0.6
    mask[..., 0] |= ~mask.any(-1)
    some.next_observation["action_mask"] = mask
    gamma = torch.tensor([member.hyperparameters["gamma"] for member in agents]).unsqueeze(-1)
    steps = torch.randint(1, 4, (len(agents), 8), generator=generator)
    some.columns["discount"] = gamma**steps
    return some


@pytest.mark.parametrize(("loss", "expected"), [("mse", [0.25, 1.0, 9.0]), ("huber", [0.125, 0.5, 2.5])])
def test_regression_losses_by_hand(loss, expected):
    q_values, none = torch.tensor([[[-0.5], [-1.0], [3.0]]]), torch.zeros(1, 3)
    columns = {"reward": none, "terminated": none.bool()}
    found = MeanValues(DQNSettings(loss=loss)).loss(q_values, none.unsqueeze(-1), columns, torch.ones(1))
    assert found.per_sample.tolist() == [expected]
    assert found.errors.tolist() == [[-0.5, -1.0, 3.0]]


@pytest.mark.parametrize("distribution", ["categorical", "quantile"])
@pytest.mark.parametrize("double", [True, False])
def test_the_loss_is_the_papers_for_each_agent(distribution, double):
    dqn = algorithm(
        f"algorithm={{distribution: {distribution}, double: {double}, categorical: {{atoms: 6, v_min: -2, v_max: 3}}}}",
        "algorithm.quantile={quantiles: 6, kappa: 0.5}",
    )
    agents = family(dqn, 2)
    stack = population(agents, dqn).policy.stacks[0]
    some = masked_batch(agents)
    loss = dqn.loss(stack, some, torch.Generator())
    with torch.no_grad():
        now, following = some.observation, some.next_observation
        networks = (stack.networks["q"](now), stack.networks["q"](following), stack.target_networks["q"](following))
        atoms, next_atoms, target_atoms = (outputs["q_values"].view(2, 8, 3, 6) for outputs in networks)
    support = torch.linspace(-2, 3, 6)
    for p, b in np.ndindex(2, 8):
        judged = (next_atoms if double else target_atoms)[p, b]
        means = judged.softmax(-1) @ support if distribution == "categorical" else judged.mean(-1)
        best = means.masked_fill(~following["action_mask"][p, b], -1e9).argmax()
        reward, ended = float(some.columns["reward"][p, b]), bool(some.columns["terminated"][p, b])
        discount = 0.0 if ended else float(some.columns["discount"][p, b])
        chosen, target = atoms[p, b, some.columns["action"][p, b]].view(1, 1, 6), target_atoms[p, b, best]
        if distribution == "categorical":
            goal = categorical_projection(
                target.softmax(-1).view(1, 1, 6), (reward + discount * support).view(1, 1, 6), -2.0, 3.0
            )
            expected = cross_entropy(chosen, goal).item()
        else:
            returns = reward + discount * target
            expected = quantile_huber(chosen, returns.view(1, 1, 6), 0.5).item()
        assert loss.per_sample[p, b].item() == pytest.approx(expected, rel=1e-4)
        assert loss.errors[p, b].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("options", DQNS.values(), ids=DQNS)
def test_stacks_learn_as_their_agents_do_alone(options, monkeypatch):
    monkeypatch.setattr(WeightNoise, "draw", same_noise)
    dqn = algorithm(*options)
    agents = family(dqn)
    batches = [masked_batch(agents, seed) for seed in range(5)]
    check_stacks_equal_singles(agents, dqn, batches, seen(torch.randn(3, 4, 5)), rtol=1e-3, atol=1e-5)


PROBE = (
    "environment.id=helpers.probes:Probe-v0", "environment.num_envs=4", "environment.kwargs={truncates: true}",
    "algorithm.gamma=0.5", "algorithm.batch_size=32", "algorithm.learn_step=4",
    "algorithm.exploration={start: 1.0, end: 1.0}", "replay.capacity=2000",
)  # fmt: skip


@pytest.mark.parametrize("name", ["quantile, dueling, no kappa", "noisy, dueling, categorical, normalised"])
def test_a_truncated_step_is_worth_what_would_have_followed(name):
    """For ever 1 a step, discounted by 0.5, is 2; the wrong action loses 1 of it."""
    learner, _ = trained(*DQNS[name], *PROBE, "algorithm.tau=0.1", "replay.n_step=3", steps=500)
    shown = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).expand(2, 2, 2)
    (stack,), dqn = learner.policy.stacks, learner.policy.algorithm
    with torch.no_grad():
        q = dqn.q_values(stack.networks["q"](seen(shown)))
    torch.testing.assert_close(q, 1 + torch.eye(2).expand(2, 2, 2), atol=0.2, rtol=0)


@pytest.mark.parametrize(("v_max", "warns"), [(1.0, True), (2.5, False)])
def test_returns_outside_the_support_are_told(v_max, warns):
    """The best action is worth 2."""
    support = f"algorithm.categorical={{atoms: 11, v_min: 0, v_max: {v_max}}}"
    learner, _ = trained(*PROBE, "algorithm.distribution=categorical", support, "algorithm.tau=0.1", steps=300)
    found = learner.metrics()
    shares = {name: found.sums[name] / found.counts[name] for name in found.sums}
    assert (shares["outside_support"] > 0.1).all() == warns
    told = config("algorithm.distribution=categorical", support).algorithm.warning(
        shares, np.array([-200.0, np.nan, -187.5])
    )
    assert (told is not None) == warns
    if told:
        assert "lay outside v_min 0 to v_max 1 and were learned as the nearest end" in told
        assert told.endswith("; episodes returned -200 to -187.5 before discounting")


def test_a_run_says_once_that_returns_lie_outside_the_support(in_directory):
    support = "algorithm={distribution: categorical, categorical: {v_min: 0, v_max: 1}}"
    with pytest.warns(EvorlWarning) as caught:
        assert train("run.name=a", support, "training.max_steps=108") == 0
    told = [str(each.message) for each in caught if "outside v_min 0 to v_max 1" in str(each.message)]
    assert len(told) == 1
    assert told[0].startswith("algorithm.categorical: ")
