"""A user's own `nn.Module` as a stacked network, through vmap. Axes: P agents, B batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from evorl.networks.layout import Layout
from evorl.networks.parameters import ParameterSpec, Specs
from evorl.plugins import import_from_here
from evorl.types import Architecture, Tensors, UserError

Factory = Callable[[int, int], nn.Module]


class ModuleNetwork:
    """[P, B, inputs] -> [P, B, outputs] through copies of one module, which `factory(inputs, outputs)` makes.

    The module runs in evaluation mode, with its buffers as the first copy made them; parameters that do not require
    gradients stay as they are. Its shapes are its own: architecture mutations leave it alone.
    """

    def __init__(self, factory: Factory, inputs: int, outputs: int) -> None:
        self.factory = factory
        self.inputs = inputs
        self.outputs = outputs
        self.module = self._make(seed=0)
        self._frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        self.module.requires_grad_(False)
        self._device = torch.device("cpu")
        self._forward = vmap(self._forward_one)

    def specs(self, architecture: Architecture, stacked: bool = False) -> Specs:
        """The parameters of one agent, with nothing to pad."""
        return {
            name: ParameterSpec(tuple(p.shape), "zeros", trained=name not in self._frozen)
            for name, p in self.module.named_parameters()
        }

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """Fresh parameters of one agent, as the module itself initialises them."""
        module = self._make(seed=int(torch.randint(2**62, (), generator=generator)))
        return {name: value.detach().float() for name, value in module.named_parameters()}

    def forward(self, layout: Layout, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """[P, B, inputs] -> [P, B, outputs] with the stack's parameters `p`."""
        if self._device != x.device:
            self._device = x.device
            self.module.to(x.device)
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
            module = self.factory(self.inputs, self.outputs)
        if not isinstance(module, nn.Module):
            raise TypeError(f"the factory returned a {type(module).__name__}, not an nn.Module")
        return module.eval()


def load_factory(path: str) -> Factory:
    """The function that `package.module:function` names. Raises UserError."""
    module_name, colon, name = path.partition(":")
    if not colon:
        raise UserError(f"network.factory: {path!r} must have the form package.module:function")
    try:
        factory = getattr(import_from_here(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"network.factory: cannot import {path!r}: {error}") from error
    if not callable(factory):
        raise UserError(f"network.factory: {path!r} is not callable")
    return factory  # type: ignore[no-any-return]


def module_network(factory: str, inputs: int, outputs: int) -> ModuleNetwork:
    """The network of a factory given by name. Raises UserError where it does not map vectors to vectors."""
    make = load_factory(factory)
    try:
        network = ModuleNetwork(make, inputs, outputs)
        values = network.initialise(Architecture(), torch.Generator())
        two_agents = {name: torch.stack([value, value]) for name, value in values.items()}
        got = network.forward(Layout(Architecture(), ()), two_agents, torch.zeros(2, 3, inputs)).shape[1:]
    except Exception as error:  # Whatever a user's code may raise.
        raise UserError(f"network.factory: {factory!r} fails under vmap: {' '.join(str(error).split())}") from error
    if got != (3, outputs):
        raise UserError(f"network.factory: {factory!r} maps [3, {inputs}] to {list(got)}; it must give [3, {outputs}]")
    return network
