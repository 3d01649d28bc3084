"""A user's `nn.Module` as a stacked network, through vmap. Axes: P agents, B batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from evorl.config import Network as NetworkSettings
from evorl.envs.spaces import ObservationSpec, ObservationSpecs, as_numbers
from evorl.networks.flat import Weights
from evorl.networks.parameters import ParameterSpec, Specs
from evorl.networks.stack import Layout, Network
from evorl.system.plugins import described, imported
from evorl.types.agents import FEATURES, Architecture, Head
from evorl.types.batches import RecurrentInput
from evorl.types.outcomes import UserError
from evorl.types.tensors import Observation, Tensors

Inputs = int | tuple[int, ...]
Factory = Callable[[Inputs, int], nn.Module]


class ModuleNetwork(Network):
    """A vmapped user module made by `factory(inputs, outputs)`: [P, B, inputs] -> all heads' outputs.

    `inputs` is the width of a vector, or the shape of an image. The module runs in evaluation mode, with the buffers of
    its first instance; parameters that do not require gradients stay fixed. Its architecture is fixed too: architecture
    mutations do not apply. Its output is the concatenation of all heads except constant ones, which are separate
    parameters.
    """

    def __init__(self, factory: Factory, name: str, part: ObservationSpec, heads: Sequence[Head]) -> None:
        self.factory = factory
        self.part = part
        self.inputs: Inputs = part.shape if part.kind == "image" else part.width
        self.constants = {head: f"constant.{head.name}" for head in heads if head.constant}
        """The parameter of each head that does not depend on the observation."""
        self.outputs = {head.name: head.outputs for head in heads if not head.constant}
        self.module = self._make(seed=0)
        self._part_name = name
        self._shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        self._frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        self.module.requires_grad_(False)
        self._device = torch.device("cpu")
        self._forward = vmap(self._forward_one)

    def specs(self, architecture: Architecture) -> Specs:
        specs = {
            name: ParameterSpec((), shape, "zeros", trained=name not in self._frozen)
            for name, shape in self._shapes.items()
        }
        return specs | {
            name: ParameterSpec((1,), (head.outputs,), "ones", gain=head.bias) for head, name in self.constants.items()
        }

    def initialise(self, architecture: Architecture, generator: torch.Generator) -> Tensors:
        """The parameters of a new instance of the module."""
        module = self._make(seed=int(torch.randint(2**62, (), generator=generator)))
        values = {name: value.detach().float() for name, value in module.named_parameters()}
        return values | {name: torch.full((1, head.outputs), head.bias) for head, name in self.constants.items()}

    def forward(
        self, layout: Layout, p: Weights, x: Observation, recurrent: RecurrentInput | None
    ) -> tuple[Tensors, Tensor | None]:
        outputs = self.joined(p, x).split(list(self.outputs.values()), -1)
        constants = {head.name: p[name] for head, name in self.constants.items()}
        return dict(zip(self.outputs, outputs, strict=True)) | constants, None

    def joined(self, p: Mapping[str, Tensor], x: Observation) -> Tensor:
        """Call each agent's module; its output [P, B, outputs] concatenates all heads."""
        seen = x[self._part_name]
        if self._device != seen.device:
            self._device = seen.device
            self.module.to(seen.device)
        seen = as_numbers(seen, self.part)
        if self.part.kind == "vector":
            seen = seen.reshape(*seen.shape[:2], self.part.width)
        parameters = {name: p[name].view(-1, *shape) for name, shape in self._shapes.items()}
        outputs: Tensor
        if torch.onnx.is_in_onnx_export():
            # ONNX's exporter, which traces one agent, refuses a module that is called with other parameters.
            for name, own in self.module.named_parameters():
                own.data = parameters[name][0]
            outputs = self.module(seen[0]).unsqueeze(0)
        else:
            outputs = self._forward(parameters, seen)
        return outputs

    def _forward_one(self, p: Tensors, x: Tensor) -> Tensor:
        output: Tensor = functional_call(self.module, p, (x,))
        return output

    def _make(self, seed: int) -> nn.Module:
        # Modules initialise from the global generator; fork it so that no other random stream changes.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.factory(self.inputs, sum(self.outputs.values()))
        if not isinstance(module, nn.Module):
            raise TypeError(f"the factory returned a {type(module).__name__}, not an nn.Module")
        return module.eval()


def module_network(
    settings: NetworkSettings,
    parts: ObservationSpecs,
    heads: Sequence[Head],
    normalized: Collection[str],
    noise: float | None,
) -> ModuleNetwork:
    """The network of `network.factory`. Raises UserError if it does not map one part to the heads' outputs."""
    if settings.bf16:
        raise UserError(
            "network.bf16: a module computes as it is written; use accelerate's `mixed_precision: 'no'` and let the "
            "module compute in bfloat16"
        )
    if noise is not None:
        raise UserError("algorithm.noisy: a module has to have noisy layers of its own; leave it out")
    if any(head.name == FEATURES for head in heads):
        raise UserError(
            "algorithm.state_dependent_noise: a module does not show the features of its last layer, which this noise "
            "depends on; leave it out, or use network.name=standard"
        )
    if any(head.bias for head in heads if not head.constant):
        raise UserError(
            "algorithm.initial_log_std: a module initialises its outputs itself; leave it out, or use "
            "algorithm.distribution=gaussian"
        )
    factory = settings.factory or ""
    make: Factory = imported("network.factory", factory, "package.module:function")
    if len(parts) > 1 or any(part.kind == "categories" for part in parts.values()):
        raise UserError(f"network.name: a module reads one vector or image; here it is to read {', '.join(parts)}")
    if normalized:
        raise UserError(
            "algorithm.normalize_observations: a module has to normalise what it reads by itself; use false"
        )
    ((name, part),) = parts.items()
    outputs, problem = sum(head.outputs for head in heads if not head.constant), "raised"
    try:
        network = ModuleNetwork(make, name, part, heads)
        values = network.initialise(Architecture(), torch.Generator())
        problem = "fails under vmap:"
        two_agents = {name: torch.stack([value, value]).view(2, 1, -1) for name, value in values.items()}
        got = network.joined(two_agents, {name: torch.zeros(2, 3, *part.shape)}).shape[1:]
    except Exception as error:  # User code may raise anything.
        raise UserError(f"network.factory: {factory!r} {problem} {described(error)}") from error
    if got != (3, outputs):
        raise UserError(f"network.factory: {factory!r} maps a batch of 3 to {list(got)}; it must return [3, {outputs}]")
    return network
