"""A stack of agents computes what each of its agents computes alone."""

import itertools
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import (
    agent,
    algorithm,
    batch,
    batch_of,
    check_stacks_equal_singles,
    fields_of,
    population,
    seen,
)

from evorl.networks import small_image_setting
from evorl.networks.dense import ACTIVATIONS
from evorl.networks.stack import joint, padded, plan_stacks
from evorl.types.agents import Architecture, Convolution

MIXED = [
    Architecture((16, 16), (0, 0), "silu"),
    Architecture((48, 20), (1, 0), "silu"),
    Architecture((64, 33), (0, 2), "silu"),
    Architecture((5, 64), (0, 0), "silu"),
    Architecture((16, 16), (1, 1), "silu"),
    Architecture((40, 40), (0, 0), "silu"),
]


def variants():
    return [
        [replace(a, layer_norm=layer_norm, branches=branches) for a in MIXED]
        for layer_norm, branches in itertools.product((False, True), ("shared", "last"))
    ]


def dqn_for(architectures, *overrides):
    return algorithm(f"algorithm.dueling={architectures[0].branches == 'last'}", *overrides)


def family(architectures, dqn):
    return [
        agent(
            architecture, id=index, dqn=dqn, learning_rate=1e-3 * (index + 1), gamma=0.9 + 0.01 * index,
            tau=0.01 * (index + 1), max_grad_norm=0.05 * (index + 1),
        )
        for index, architecture in enumerate(architectures)
    ]  # fmt: skip


@pytest.mark.parametrize("architectures", variants())
def test_stacks_act_learn_and_update_as_their_agents_do_alone(architectures):
    dqn = dqn_for(architectures, "algorithm.max_grad_norm=1.0")
    agents = family(architectures, dqn)
    batches = [batch(agents, seed=seed) for seed in range(4)]
    check_stacks_equal_singles(agents, dqn, batches, seen(torch.randn(len(agents), 3, 5)))


def test_agents_that_are_not_due_keep_everything():
    agents = [agent(id=index) for index in range(3)]
    together = population(agents)
    some = batch(agents)
    some.due[1] = 0
    together.update(some)
    kept, learned = together.to_agents()[1], together.to_agents()[0]
    torch.testing.assert_close(kept.tensors, agents[1].tensors, rtol=0, atol=0)
    assert kept.state.updates["q"] == 0
    assert learned.state.updates["q"] == 1


def test_a_smaller_batch_is_the_mean_over_its_own_size():
    agents = [agent(id=0), agent(id=1)]
    together = population(agents)
    some = batch(agents, size=8)
    some.weight[1] = torch.tensor([1 / 3] * 3 + [0.0] * 5)
    alone = population(agents[1:])
    part = some.part(slice(1, 2))
    small = batch_of(
        {name: value[:, :3] for name, value in fields_of(part).items()}, torch.full((1, 3), 1 / 3), part.due
    )
    together.update(some)
    alone.update(small)
    torch.testing.assert_close(together.to_agents()[1].tensors, alone.to_agents()[0].tensors)


@pytest.mark.parametrize("shape", [(), (5,), (3, 2)])
def test_a_users_module_reads_every_vector_flat(shape):
    spaces = {"observations": gym.spaces.Box(-1.0, 1.0, shape)}
    dqn = algorithm("network={name: module, factory: 'helpers.support:probe_network'}", **spaces)
    (stack,) = population([agent(id=id, dqn=dqn) for id in range(2)], dqn).policy.stacks
    assert stack.networks["q"](seen(torch.randn(2, 4, *shape)))["q_values"].shape == (2, 4, 3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_maps_zero_to_zero(name):
    """Padding relies on it."""
    assert ACTIVATIONS[name](torch.zeros(3)).eq(0).all()


@pytest.mark.parametrize(("width", "expected"), [(1, 32), (32, 32), (33, 48), (48, 48), (64, 64), (65, 80)])
def test_widths_are_padded_to_multiples_of_sixteen(width, expected):
    assert padded(width) == expected


def plan(architectures, device="cpu"):
    """The stacks of agents with one network."""
    cost = algorithm().networks["q"].network.cost
    shapes = [{"q": architecture} for architecture in architectures]
    stacks = plan_stacks(shapes, lambda own: cost(own["q"]), torch.device(device))
    return [(members, layouts["q"]) for members, layouts in stacks]


def test_small_agents_share_a_stack_and_a_wide_one_does_not_slow_many():
    small = [Architecture((32, 32), (0, 0), "relu")] * 5
    assert len(plan([*small, Architecture((48, 64), (0, 0), "relu")])) == 1
    stacks = plan([*small, Architecture((512, 512), (0, 0), "relu")])
    assert sorted(len(members) for members, _ in stacks) == [1, 5]
    shallow = [Architecture((32,), (0,), "relu")] * 5
    stacks = plan([*shallow, Architecture((1024,), (0,), "relu")])
    assert sorted(len(members) for members, _ in stacks) == [1, 5]


def test_on_a_gpu_launches_cost_more_than_padding():
    sizes = [*[(32, 32)] * 5, (512, 512), *[(256, 64)] * 4]
    architectures = [Architecture(size, (0, 0), "relu") for size in sizes]
    assert len(plan(architectures)) > 1
    assert len(plan(architectures, "cuda")) == 1
    assert len(plan([*architectures, *[Architecture((8192, 8192), (0, 0), "relu")] * 2], "cuda")) == 2


CPU = torch.device("cpu")
CONVOLVED = Architecture((16, 16), (0, 0), "relu", convolutions=(Convolution(8, 4, 2),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MIXED[0], replace(MIXED[0], activation="tanh")),
        (MIXED[0], replace(MIXED[0], layer_norm=True)),
        (MIXED[0], replace(MIXED[0], branches="last")),
        (MIXED[0], replace(MIXED[0], hidden_sizes=(16,), residual_layers=(0,))),
        (MIXED[0], replace(MIXED[0], recurrent="gru", recurrent_size=8)),
        (replace(MIXED[0], recurrent="lstm", recurrent_size=8), replace(MIXED[0], recurrent="gru", recurrent_size=8)),
        (CONVOLVED, replace(CONVOLVED, convolutions=(Convolution(8, 3, 2),))),
        (CONVOLVED, replace(CONVOLVED, convolutions=(Convolution(8, 4, 1),))),
    ],
    ids=["activation", "norm", "branches", "depth", "memory", "cell", "kernel", "stride"],
)
def test_agents_of_different_kinds_do_not_share_a_stack(one, other):
    stacks = plan_stacks([{"q": each} for each in (one, other, one, other)], lambda own: 1.0, CPU)
    assert sorted(sorted(members) for members, _ in stacks) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("side", "kernels"), [(84, (8, 4, 3)), (36, (8, 4, 3)), (35, (4, 3)), (12, (4, 3)), (10, (3,)), (2, (1,))]
)
def test_default_convolutions_fit_the_image(side, kernels):
    space = gym.spaces.Box(0, 255, (side, side + 3, 1), np.uint8)
    made = algorithm(observations=space)
    (network,) = made.networks.values()
    assert tuple(layer.kernel for layer in network.architecture.convolutions) == kernels
    assert network.network.specs(network.architecture)
    setting = small_image_setting(made.interface.parts)
    assert (setting is None) == (side >= 36)
    if setting:
        (network,) = algorithm(setting.strip("'"), observations=space).networks.values()
        assert tuple(layer.kernel for layer in network.architecture.convolutions) == kernels, "the line can be pasted"


def test_the_cost_of_convolutions_is_their_multiplications():
    """10 x 10 pixels: 4 x 4 of 5 kernels of 4 x 4, then 2 x 2 of 6 kernels of 3 x 3 and a 3 x 3 layer behind them."""
    image = gym.spaces.Box(0, 255, (10, 10), "uint8")
    layers = (Convolution(5, 4, 2), Convolution(6, 3, 1, residual_layers=1))
    some = "network.convolutions=[{channels: 5, kernel: 4, stride: 2}]"
    images = algorithm(some, observations=image).networks["q"].network.images
    cost = images["observation"].cost(replace(MIXED[0], convolutions=layers))
    assert cost == 16 * (1 * 5 * 4**2) + 4 * (5 * 6 * 3**2 + 6 * 6 * 3**2)


def test_a_plan_places_every_agent_once_and_gives_it_room():
    architectures = [
        Architecture((width, other), (depth, 0), name)
        for width, other, depth, name in itertools.product((8, 200, 40), (16, 90), (0, 2), ("relu", "elu"))
    ] + [Architecture((30,), (1,), "relu"), Architecture((30, 30), (0, 0), "relu", layer_norm=True)]
    stacks = plan(architectures)
    assert sorted(index for members, _ in stacks for index in members) == list(range(len(architectures)))
    for members, layout in stacks:
        assert layout.architecture == joint([architectures[i] for i in members])
        assert {architectures[i].activation for i in members} == {layout.architecture.activation}
        assert layout.agents == len(members)
        for index in members:
            assert all(
                a <= b for a, b in zip(architectures[index].hidden_sizes, layout.architecture.hidden_sizes, strict=True)
            )
