"""Products in bfloat16, with parameters and the optimiser in float32."""

from dataclasses import replace

import gymnasium as gym
import pytest
import torch
import yaml
from helpers import replayed, support
from helpers.kinds import CONVOLUTIONS, OBSERVATIONS
from helpers.support import agent, algorithm, config, lines, population

from evorl.config.algorithms import SETTINGS
from evorl.runs.launch import load_config
from evorl.types.outcomes import UserError

BF16, SAC = "network.bf16=true", "algorithm={name: sac, gamma: 0.9, tau: 0.1}"
BOX = gym.spaces.Box(-1.0, 1.0, (2,))
SIZES = "network.hidden_sizes=[64,64]"
CASES = {
    "plain": (),
    "dueling, normalised": ("algorithm.dueling=true", "network.layer_norm=true"),
    "categorical, noisy": ("algorithm.distribution=categorical", "algorithm.noisy={}"),
}


def gradients(learner):
    """The flat gradients of the last update, by the network, of a population in one stack."""
    (stack,) = learner.stacks
    return {name: network.gradient.clone() for name, network in stack.networks.items()}


def differ_little(found, expected, share=0.03):
    """Check that two vectors differ, by a small part of their length."""
    difference = (found - expected).norm() / expected.norm()
    assert 0 < difference < share, f"{difference:.4f} of the length"


def learned(*overrides, updates=1, **spaces):
    """A population that has learned from random batches."""
    chosen = algorithm(SIZES, *overrides, **spaces)
    learner = population([agent(id=id, dqn=chosen) for id in range(3)], chosen)
    for seed in range(updates):
        if chosen.settings.name == "dqn":
            learner.update(support.batch(learner.policy.agents, seed=seed))
        else:
            learner.update(replayed.replayed_batch(chosen, 3, seed=seed))
    return learner


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_gradients_are_nearly_those_of_float32_and_what_is_kept_is_float32(settings):
    exact, rounded = learned(*settings), learned(*settings, BF16)
    differ_little(gradients(rounded)["q"], gradients(exact)["q"])
    for trained in rounded.to_agents():
        assert {value.dtype for roles in trained.tensors["q"].values() for value in roles.values()} == {torch.float32}


def test_gradients_that_pass_through_a_critic_are_nearly_those_of_float32():
    exact, rounded = learned(SAC, actions=BOX), learned(SAC, BF16, actions=BOX)
    for name, found in gradients(rounded).items():
        differ_little(found, gradients(exact)[name], 0.06)


def test_convolutions_multiply_in_bfloat16_too():
    outputs = []
    for overrides in ((), (BF16,)):
        dqn = algorithm(CONVOLUTIONS, *overrides, observations=OBSERVATIONS["channels last"])
        learner = population([agent(id=id, dqn=dqn) for id in range(2)], dqn)
        image = torch.randint(256, (2, 4, 12, 12, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        (stack,) = learner.policy.stacks
        (encoder,) = stack.networks["q"].network.images.values()
        outputs.append(encoder.forward(stack.networks["q"].layout, stack.networks["q"].weights, image))
    differ_little(outputs[1], outputs[0], 0.01)


@pytest.mark.parametrize("overhead", [0, 10**9])
def test_agents_of_a_stack_learn_as_they_do_alone(overhead, monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
    dqn = algorithm(BF16, "algorithm.dueling=true")
    shapes = [replace(support.first_architecture(dqn), hidden_sizes=sizes) for sizes in ((64, 33), (48, 64), (16, 16))]
    agents = [agent(shape, id=id, dqn=dqn) for id, shape in enumerate(shapes)]
    together, batch = population(agents, dqn), support.batch(agents)
    errors = together.update(batch).errors
    for index, (single, trained) in enumerate(zip(agents, together.to_agents(), strict=True)):
        alone = population([single], dqn)
        # Products of other sizes add up in another order, so that here and there a last digit of bfloat16 differs.
        torch.testing.assert_close(
            alone.update(batch.part(slice(index, index + 1))).errors[0], errors[index], rtol=0.03, atol=0.03
        )
        means = [each.tensors["q"]["mean"] for each in (trained, alone.to_agents()[0])]
        found, expected = (torch.cat([value.flatten() for value in mean.values()]) for mean in means)
        assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("name", [name for name, settings in SETTINGS.items() if settings.actor_messages is None])
def test_every_algorithm_acts_in_it(name):
    space = {} if name == "dqn" else {"actions": BOX}
    outputs = []
    for overrides in ((), (BF16,)):
        chosen = algorithm(f"algorithm={{name: {name}}}", SIZES, *overrides, **space)
        policy = population([agent(dqn=chosen)], chosen).policy
        look = support.seen(torch.randn(1, 50, 5, generator=torch.Generator().manual_seed(0)))
        outputs.append(policy.value(look, None))
    differ_little(outputs[1], outputs[0], 0.05)


@pytest.mark.parametrize(
    ("accelerate", "setting", "expected"),
    [("bf16", [], True), ("no", [], False), ("no", [BF16], True), ("bf16", [BF16], True)],
)
def test_accelerate_is_asked_where_the_configuration_is_silent(accelerate, setting, expected, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", accelerate)
    assert load_config(setting, support.SMALL).network.bf16 is expected


def test_two_answers_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(UserError, match=r"network\.bf16: false, and accelerate's mixed_precision is 'bf16'"):
        load_config(["network.bf16=false"], support.SMALL)
    assert config().network.bf16 is None


@pytest.mark.two_process
def test_two_ranks_train_alike_as_accelerate_was_asked(tmp_path, forked_launch):
    """`accelerate launch --mixed_precision bf16` sets this variable of its ranks."""
    settings = "run.name=a", "training.max_steps=96", "evolution.steps=48", "evaluation.max_steps=10"
    asked = "import os; os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'"
    done = forked_launch.well(tmp_path, *settings, first=asked)
    assert "products in bfloat16" in done.stderr
    run = tmp_path / "runs" / "a"
    assert yaml.safe_load((run / "config.yaml").read_text())["network"]["bf16"] is True
    rows = lines(run / "metrics.jsonl")
    assert not any(row["drifts"] for row in rows)
    assert min(rows[-1]["updates"]) > 0
