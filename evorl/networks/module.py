"""A user's own `nn.Module` as a stacked network, through vmap. Axes: P agents, B batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from evorl.networks.layout import Layout
from evorl.networks.parameters import ParameterSpec, Specs
from evorl.types import Architecture, Tensors, UserError

Factory = Callable[[int, int], nn.Module]


class ModuleNetwork:
    """[P, B, inputs] -> [P, B, outputs] through copies of one module, which `factory(inputs, outputs)` makes.

    The module runs in evaluation mode and its buffers stay as they were made. Its shapes are its own: architecture
    mutations leave it alone.
    """

    def __init__(self, factory: Factory, inputs: int, outputs: int) -> None:
        self.factory = factory
        self.inputs = inputs
        self.outputs = outputs
        self.module = self._make(seed=0).requires_grad_(False)
        self._forward = vmap(self._forward_one)

    def specs(self, architecture: Architecture, stacked: bool = False) -> Specs:
        """The parameters of one agent, with nothing to pad."""
        trained = {name: ParameterSpec(tuple(p.shape), "zeros") for name, p in self.module.named_parameters()}
        return trained | {
            name: ParameterSpec(tuple(b.shape), "zeros", trained=False) for name, b in self.module.named_buffers()
        }

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Fresh parameters of one agent, as the module itself initialises them."""
        module = self._make(seed=int(torch.randint(2**62, (), generator=generator)))
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        return {name: value.detach().float() for name, value in values.items()}

    def forward(self, layout: Layout, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """[P, B, inputs] -> [P, B, outputs] with the stack's parameters `p`."""
        return self._forward(dict(p), x)

    def without_layer(self, architecture: Architecture, index: int, tensors: Tensors) -> tuple[Tensors, set[str]]:
        """A module has no layer that could go."""
        raise ValueError("a user's module has no hidden layers to remove")

    def _forward_one(self, p: Tensors, x: Tensor) -> Tensor:
        output: Tensor = functional_call(self.module, p, (x,))
        return output

    def _make(self, seed: int) -> nn.Module:
        # A module draws its first values from the global generator; fork it so that nothing else notices.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.factory(self.inputs, self.outputs).eval()


def load_factory(path: str) -> Factory:
    """The function that `package.module:function` names. Raises UserError."""
    module_name, colon, name = path.partition(":")
    if not colon:
        raise UserError(f"network.factory: {path!r} must have the form package.module:function")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"network.factory: cannot import {path!r}: {error}") from error
    if not callable(factory):
        raise UserError(f"network.factory: {path!r} is not callable")
    return factory  # type: ignore[no-any-return]


def module_network(factory: str, inputs: int, outputs: int) -> ModuleNetwork:
    """The network of a factory given by name. Raises UserError where it does not map vectors to vectors."""
    network = ModuleNetwork(load_factory(factory), inputs, outputs)
    if not isinstance(network.module, nn.Module):
        raise UserError(f"network.factory: {factory!r} returned a {type(network.module).__name__}, not an nn.Module")
    got = network.module(torch.zeros(2, inputs)).shape
    if got != (2, outputs):
        raise UserError(f"network.factory: {factory!r} maps [2, {inputs}] to {list(got)}; it must give [2, {outputs}]")
    return network
