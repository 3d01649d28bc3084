"""The stacked Adam against torch's own, agent by agent."""

import torch

from evorl.networks.flat import FlatTensors
from evorl.networks.optimizer import StackedAdam

SHAPES = {"weight": (4, 3), "bias": (3,)}
RATES = torch.tensor([1e-3, 1e-2, 3e-4])


def gradients(step):
    flat = FlatTensors(SHAPES, 3, torch.device("cpu"))
    flat.flat.copy_(torch.randn(flat.flat.shape, generator=torch.Generator().manual_seed(step)))
    return flat


def optimizer(start):
    """Adam on `start`, with a gradient to be filled in."""
    return StackedAdam(start, torch.zeros_like(start.flat), 1e-2)


def take_step(adam, gradient, rates, active=None):
    adam.gradient.copy_(gradient)
    adam.step(rates, active)


def test_it_is_adam_for_each_agent_alone():
    start = gradients(100)
    adam = optimizer(start)
    parameters = [[view[agent].clone().requires_grad_() for view in start.views.values()] for agent in range(3)]
    references = [torch.optim.Adam(p, lr=float(rate), eps=1e-2) for p, rate in zip(parameters, RATES, strict=True)]
    for step in range(20):
        due = torch.tensor([1.0, float(step % 2), float(step > 10)])
        gradient = gradients(step)
        take_step(adam, gradient.flat, RATES, due)
        for agent in range(3):
            if due[agent]:
                for parameter, view in zip(parameters[agent], gradient.views.values(), strict=True):
                    parameter.grad = view[agent].clone()
                references[agent].step()
    for agent in range(3):
        for view, expected in zip(start.views.values(), parameters[agent], strict=True):
            torch.testing.assert_close(view[agent], expected.detach(), rtol=1e-5, atol=1e-6)
    assert adam.updates.tolist() == [20, 10, 9]


def test_a_step_of_all_agents_is_the_same_as_one_of_those_that_are_active():
    one, other = gradients(100), gradients(100)
    everyone, each = optimizer(one), optimizer(other)
    due = [torch.ones(3)] * 3 + [torch.tensor([1.0, 0.0, 1.0])] + [torch.ones(3)] * 3
    for step, active in enumerate(due):
        gradient, rates = gradients(step).flat, RATES * (1 + step % 3)
        take_step(everyone, gradient, rates, None if active.all() else active)
        take_step(each, gradient, rates, active)
    assert torch.equal(one.flat, other.flat)
    assert everyone.updates.tolist() == each.updates.tolist() == [7, 6, 7]
