"""Noisy layers: the law of their noise, and whose gradient is whose. Axes: P agents."""

import math

import pytest
import torch
from helpers.kinds import OBSERVATIONS
from helpers.support import (
    agent,
    algorithm,
    config,
    first_architecture,
    greedy,
    population,
    seen,
)

from evorl.config import validate
from evorl.networks.flat import Weights
from evorl.networks.stack import SIGMA, WeightNoise

NOISY = "algorithm.noisy={sigma: 0.4}"
DUELING = "algorithm.dueling=true"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_noise_is_factorised_and_each_agents_own():
    matrices = {"a.weight": (1, 40, 30), "a.bias": (1, 1, 30), "b.weight": (2, 5, 6)}
    noise = WeightNoise(matrices | {SIGMA + name: shape for name, shape in matrices.items()}, agents=200)
    found, more = noise.draw(generator()), noise.draw(generator())
    assert {name: value.shape for name, value in found.items()} == {
        "a.weight": (200, 40, 30), "a.bias": (200, 1, 30), "b.weight": (400, 5, 6)
    }  # fmt: skip
    assert all(torch.equal(more[name], value) for name, value in found.items())
    assert not any(torch.equal(value, noise.draw(generator(1))[name]) for name, value in found.items())
    # f(x)^2 is |x|, whose mean is sqrt(2 / pi).
    assert found["a.weight"].var().item() == pytest.approx(2 / math.pi, rel=0.05)
    assert found["a.bias"].var().item() == pytest.approx(math.sqrt(2 / math.pi), rel=0.05)
    assert abs(found["a.weight"].mean()) < 0.05
    rows = found["b.weight"]
    torch.testing.assert_close(rows[:, 1:, 1:] * rows[:, :1, :1], rows[:, 1:, :1] * rows[:, :1, 1:])
    inputs = found["a.weight"] / found["a.bias"]
    torch.testing.assert_close(inputs, inputs[..., :1].expand_as(inputs), rtol=1e-3, atol=1e-3)
    between = torch.corrcoef(found["a.bias"].flatten(1)[:20])
    assert (between - torch.eye(20)).abs().max() < 0.8, "no two agents have the same"


def test_only_the_last_hidden_layer_and_heads_are_noisy_and_begin_as_the_paper_says():
    space = OBSERVATIONS["tuple"]
    dqn = algorithm(NOISY, DUELING, "network.hidden_sizes=[20]", observations=space)
    values = dqn.networks["q"].network.initialise(first_architecture(dqn), generator())
    widths = {name: part.width for name, part in dqn.interface.parts.items()}
    assert {name for name in values if name.startswith(SIGMA)} == {
        SIGMA + name
        for name in (
            "hidden.0.bias", *(f"hidden.0.weight.{part}" for part in widths),
            *(f"{head}.{kind}" for head in ("advantage", "value") for kind in ("weight", "bias")),
        )
    }  # fmt: skip
    for name, value in values.items():
        if name.startswith(SIGMA):
            inputs = sum(widths.values()) if "hidden" in name else 20
            torch.testing.assert_close(value, torch.full_like(value, 0.4 / math.sqrt(inputs)))
    deep = algorithm(NOISY, "network.hidden_sizes=[20, 12, 9]")
    assert {name for name in deep.networks["q"].network.specs(first_architecture(deep)) if name.startswith(SIGMA)} == {
        SIGMA + name for name in ("hidden.2.weight", "hidden.2.bias", "q_values.weight", "q_values.bias")
    }


def test_a_call_with_noise_has_the_weights_with_noise(monkeypatch):
    dqn = algorithm(NOISY, "network.activation=tanh", "network.layer_norm=false")
    agents = [agent(id=id, dqn=dqn) for id in range(3)]
    (stack,), x = population(agents, dqn).policy.stacks, torch.randn(3, 4, 5)
    network, drawn = stack.networks["q"], {}
    draw = WeightNoise.draw
    monkeypatch.setattr(WeightNoise, "draw", lambda noise, given: drawn.setdefault("noise", draw(noise, given)))
    found, means = network.with_noise(generator())(seen(x))["q_values"], network(seen(x))["q_values"]
    for p, member in enumerate(agents):
        values = member.tensors["q"]["parameters"]

        def weight(name, noise=True, p=p, values=values):
            value = values[name]
            rows, columns = value.shape
            scale = values.get(SIGMA + name, torch.zeros(())) if noise else 0.0
            extra = drawn["noise"][name][p, :rows, :columns] if name in drawn["noise"] else torch.zeros(())
            return value + scale * extra

        for noise, outputs in ((True, found), (False, means)):
            y = torch.tanh(x[p] @ weight("hidden.0.weight.observation", noise) + weight("hidden.0.bias", noise))
            y = torch.tanh(y @ weight("hidden.1.weight", noise) + weight("hidden.1.bias", noise))
            expected = y @ weight("q_values.weight", noise) + weight("q_values.bias", noise)
            torch.testing.assert_close(outputs[p], expected)
    assert not torch.allclose(found, means)
    gradient = Weights(network.gradient(found.sum(-1), torch.ones(3, 4)), network.weights.shapes, {})
    assert all(gradient[SIGMA + name].any() for name in drawn["noise"])


def test_noise_is_off_in_evaluation_and_new_in_every_step():
    dqn = algorithm("algorithm.noisy={sigma: 4}")
    group = population([agent(id=id, dqn=dqn) for id in range(3)], dqn)
    observation = seen(torch.randn(3, 500, 5))
    before = group.policy.generator.get_state()
    best, _ = greedy(group, observation)
    assert torch.equal(greedy(group, observation)[0], best)
    assert torch.equal(group.policy.generator.get_state(), before)
    expected = group.policy.joined([dqn.q_values(s.networks["q"](observation)) for s in group.policy.stacks])
    assert torch.equal(best, expected.argmax(-1))
    state, started = group.policy.initial_state(500), torch.zeros(3, 500, dtype=torch.bool)
    actions = [group.policy.act(observation, started, state)[0].action for _ in range(2)]
    for action, other in zip(actions, (best, actions[0]), strict=True):
        assert (action != other).any(1).all()
    plain = algorithm()
    assert plain.networks["q"].network is not None
    stack = population([agent(dqn=plain)], plain).policy.stacks[0]
    assert stack.networks["q"].with_noise(generator()) is stack.networks["q"]


def test_noisy_layers_leave_out_random_actions_unless_they_are_configured():
    def exploration(**algorithm):
        settings = validate({"algorithm": algorithm})
        assert validate(settings.model_dump(mode="json")) == settings
        return settings.algorithm.exploration

    assert exploration().start == 1.0
    assert (exploration(noisy={}).start, exploration(noisy={}).end) == (0.0, 0.0)
    assert exploration(noisy={}, exploration={"end": 0.2}).start == 1.0
    assert config("algorithm.noisy={}").algorithm.noisy.sigma == 0.5
