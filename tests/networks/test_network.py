"""What a network has to write of itself, and what the base class gives it."""

import pytest
import torch

from evorl.networks.parameters import ParameterSpec
from evorl.networks.stack import Layout, Network
from evorl.types.agents import Architecture

LAYOUT = Layout(Architecture(), 1)


class Linear(Network):
    """One weight [3, 2], without hidden layers."""

    def specs(self, architecture):
        return {"weight": ParameterSpec((3,), (2,), "uniform")}

    def forward(self, layout, p, x, recurrent):
        return {"y": x["observation"] @ p["weight"]}, None


def test_specs_and_forward_are_enough():
    network, shape = Linear(), Architecture()
    p = network.initialise(shape, torch.Generator().manual_seed(0))
    assert {name: value.shape for name, value in p.items()} == {"weight": (3, 2)}
    assert (network.cost(shape), network.recurrent_shape(shape)) == (0, (0, 0))
    p = {"weight": p["weight"].unsqueeze(0).requires_grad_()}
    x = {"observation": torch.randn(1, 4, 3)}
    outputs, state = network.forward(LAYOUT, p, x, None)
    torch.testing.assert_close(outputs["y"], x["observation"] @ p["weight"])
    assert state is None


def test_a_network_without_forward_is_none():
    with pytest.raises(TypeError, match="forward"):
        type("Nothing", (Network,), {"specs": Linear.specs})()
