"""The stacked Adam against torch's own, agent by agent."""

import torch

from evorl.networks.optimizer import StackedAdam
from evorl.networks.parameters import FlatTensors

SHAPES = {"weight": (4, 3), "bias": (3,)}
RATES = torch.tensor([1e-3, 1e-2, 3e-4])


def gradients(step):
    flat = FlatTensors(SHAPES, 3, torch.device("cpu"))
    flat.flat.copy_(torch.randn(flat.flat.shape, generator=torch.Generator().manual_seed(step)))
    return flat


def references(start, limits):
    parameters = [[view[agent].clone().requires_grad_() for view in start.views.values()] for agent in range(3)]
    optimizers = [torch.optim.Adam(p, lr=float(rate)) for p, rate in zip(parameters, RATES, strict=True)]
    return parameters, optimizers, limits


def follow(parameters, optimizers, limits, gradient, agent):
    for parameter, view in zip(parameters[agent], gradient.views.values(), strict=True):
        parameter.grad = view[agent].clone()
    if limits is not None:
        torch.nn.utils.clip_grad_norm_(parameters[agent], float(limits[agent]))
    optimizers[agent].step()


def compare(limits):
    start = gradients(100)
    adam = StackedAdam(SHAPES, 3, 1e-8, torch.device("cpu"))
    reference = references(start, limits)
    for step in range(20):
        due = torch.tensor([1.0, float(step % 2), float(step > 10)])
        gradient = gradients(step)
        adam.step(start.flat, gradient.flat.clone(), RATES, due, limits)
        for agent in range(3):
            if due[agent]:
                follow(*reference, gradient, agent)
    for agent in range(3):
        for view, expected in zip(start.views.values(), reference[0][agent], strict=True):
            torch.testing.assert_close(view[agent], expected.detach(), rtol=1e-5, atol=1e-6)
    assert adam.updates.tolist() == [20, 10, 9]


def test_it_is_adam_for_each_agent_alone():
    compare(limits=None)


def test_each_agent_is_clipped_by_its_own_norm():
    compare(limits=torch.tensor([0.5, 100.0, 1.0]))


def test_betas_and_epsilon_are_each_agents_own():
    adam = StackedAdam(SHAPES, 3, 1e-8, torch.device("cpu"))
    adam.betas[0, 1], adam.betas[1, 1], adam.epsilon[1] = 0.5, 0.9, 1e-2
    start = gradients(100)
    parameters = [view[1].clone().requires_grad_() for view in start.views.values()]
    reference = torch.optim.Adam(parameters, lr=float(RATES[1]), betas=(0.5, 0.9), eps=1e-2)
    for step in range(5):
        gradient = gradients(step)
        adam.step(start.flat, gradient.flat, RATES, torch.ones(3))
        for parameter, view in zip(parameters, gradient.views.values(), strict=True):
            parameter.grad = view[1].clone()
        reference.step()
    for view, expected in zip(start.views.values(), parameters, strict=True):
        torch.testing.assert_close(view[1], expected.detach(), rtol=1e-5, atol=1e-6)
