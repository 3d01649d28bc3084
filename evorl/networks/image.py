"""Convolutional image encoder. Axes: P agents, B batch, C channels, H rows, W columns, G agents per call."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from evorl.config.fields import Initialisation
from evorl.envs.spaces import ObservationSpec, as_numbers
from evorl.networks.dense import ACTIVATIONS
from evorl.networks.parameters import HIDDEN_GAIN, ParameterSpec, Specs
from evorl.networks.stack import Layout
from evorl.types.agents import Architecture
from evorl.types.outcomes import UserError

RESIDUAL_KERNEL = 3


class ImageEncoder:
    """Convolutional layers for one observation part: images [P, B, ...] -> flattened features [P, B, H * W * C]."""

    def __init__(self, name: str, part: ObservationSpec, initialisation: Initialisation, bf16: bool = False) -> None:
        """With `bf16`, convolutions run in bfloat16."""
        self.initialisation = initialisation
        self.precision = torch.bfloat16 if bf16 else torch.float32
        self.name = f"encoder.{name}"
        self.part = part

    def reads(self, architecture: Architecture) -> tuple[str | int, ...]:
        """The axes of the features, as the next layer reads them: pixels of the last image, and their channels."""
        rows, columns = self.sizes(architecture)[-1]
        return rows * columns, f"channels.{len(architecture.convolutions) - 1}"

    def sizes(self, architecture: Architecture) -> list[tuple[int, int]]:
        """Each layer's output size (rows, columns). Raises UserError if a kernel is larger than its input."""
        sizes: list[tuple[int, int]] = []
        size = self.part.image_size
        for index, layer in enumerate(architecture.convolutions):
            if layer.kernel > min(size):
                raise UserError(
                    f"network.convolutions.{index}.kernel: {layer.kernel} is more than the {size[0]}x{size[1]} that "
                    f"this layer reads of the {self.part.image_size[0]}x{self.part.image_size[1]} image "
                    f"{self.name.removeprefix('encoder.')!r}; use at most {min(size)}, smaller strides before it, or "
                    "leave network.convolutions out"
                )
            size = (size[0] - layer.kernel) // layer.stride + 1, (size[1] - layer.kernel) // layer.stride + 1
            sizes.append(size)
        return sizes

    def specs(self, architecture: Architecture) -> Specs:
        """A weight and a bias for each convolution, and a ReZero scale for each residual one."""
        specs: Specs = {}
        fill, gain = self.initialisation, HIDDEN_GAIN[self.initialisation]
        source: str | int = self.part.channels
        for index in range(len(architecture.convolutions)):
            group, kernel = f"channels.{index}", architecture.convolutions[index].kernel
            layer = f"{self.name}.{index}"
            specs[f"{layer}.weight"] = ParameterSpec((source, kernel, kernel), (group,), fill, gain=gain)
            specs[f"{layer}.bias"] = ParameterSpec((1,), (group,), "zeros")
            for depth in range(architecture.convolutions[index].residual_layers):
                inner, side = f"{layer}.residual.{depth}", RESIDUAL_KERNEL
                specs[f"{inner}.weight"] = ParameterSpec((group, side, side), (group,), fill, gain=gain)
                specs[f"{inner}.bias"] = ParameterSpec((1,), (group,), "zeros")
                specs[f"{inner}.scale"] = ParameterSpec((1,), (group,), "zeros")
            source = group
        return specs

    def cost(self, architecture: Architecture) -> float:
        """Multiplications of a forward pass per image."""
        layers, sizes = architecture.convolutions, self.sizes(architecture)
        channels = [self.part.channels, *(layer.channels for layer in layers)]
        cost = 0
        for (source, target), layer, (rows, columns) in zip(pairwise(channels), layers, sizes, strict=True):
            inner = layer.residual_layers * target * target * RESIDUAL_KERNEL**2
            cost += (source * target * layer.kernel**2 + inner) * rows * columns
        return cost

    def forward(self, layout: Layout, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Encode a batch of images: [P, B, ...] -> [P, B, features]."""
        if len(self.part.shape) == 2:
            x = x.unsqueeze(2)
        elif self.part.channels_last:
            x = x.permute(0, 1, 4, 2, 3)  # The ONNX exporter writes `movedim(-1, 2)` as a permutation with a -1.
        agents = len(x)
        mine = {name: p[name] for name in p if name.startswith(f"{self.name}.")}
        # The first layer's filters include the scaling of uint8 pixels. A separate pass over all pixels made preparing
        # 512 Atari frames take 86 ms, against 31 without (13 in bfloat16, which represents 0 to 255 exactly); the rest
        # of an update takes 80.
        scale = 1 / self.part.high if x.dtype == torch.uint8 and not self.part.low else 1.0
        x = as_numbers(x, self.part) if scale == 1.0 else x
        if x.device.type != "cpu":
            joined = self._layers(layout.architecture, mine, x.transpose(0, 1).flatten(1, 2), scale)
            apart: Tensor = joined.unflatten(1, (agents, -1))
            return apart.permute(1, 0, 3, 4, 2).flatten(2)
        # On a CPU, agents run one by one: 163 ms for 4 agents of 128 frames, against 240 ms for a grouped convolution.
        parts = {name: value.split(1) for name, value in mine.items()}
        features = [
            self._layers(
                layout.architecture,
                {name: values[agent] for name, values in parts.items()},
                self._laid_out(x[agent]),
                scale,
            )
            for agent in range(agents)
        ]
        # In the layout in which convolutions are fastest: another order takes a copy, a tenth of training on MinAtar.
        return torch.stack([each.permute(0, 2, 3, 1).flatten(1) for each in features])

    def _laid_out(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] in this precision, in the layout in which their convolutions are fastest on a CPU.

        That is channels-last for a loss in float32: 169 us for an Atari frame of A3C's network, forward and backward,
        against 318, of which torch's own conversion from bytes would add 18. Otherwise it is the one they have: 59 us
        forward against 77.
        """
        if self.precision != torch.float32 or not torch.is_grad_enabled():
            return x.to(self.precision)
        laid_out = torch.empty(x.shape, memory_format=torch.channels_last)
        for channel in range(x.shape[1]):
            laid_out[:, channel] = x[:, channel]
        return laid_out

    def _layers(self, architecture: Architecture, p: Mapping[str, Tensor], x: Tensor, scale: float) -> Tensor:
        """Encode images `scale * x` [B, G * C, H, W] of G agents as images of features [B, G * C, H, W]."""
        activate = ACTIVATIONS[architecture.activation or ""]
        x = x.to(self.precision)
        for index, layer in enumerate(architecture.convolutions):
            name = f"{self.name}.{index}"
            x = self._convolve(p, name, x, layer.kernel, layer.stride, 0, 1.0 if index else scale)
            x = activate(x)
            for depth in range(layer.residual_layers):
                inner = f"{name}.residual.{depth}"
                change = activate(self._convolve(p, inner, x, RESIDUAL_KERNEL, 1, RESIDUAL_KERNEL // 2))
                x = x + p[f"{inner}.scale"].reshape(1, -1, 1, 1) * change
        return x

    def _convolve(
        self,
        p: Mapping[str, Tensor],
        name: str,
        x: Tensor,
        kernel: int,
        stride: int,
        padding: int,
        scale: float = 1.0,
    ) -> Tensor:
        """Convolve `scale * x` with one layer of G agents; weights are [G, in * kernel * kernel, out]."""
        weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
        groups, _, out = weight.shape
        filters = (scale * weight).view(groups, -1, kernel, kernel, out).permute(0, 4, 1, 2, 3).flatten(0, 1)
        x, filters, bias = (each.to(self.precision) for each in (x, filters, bias.flatten()))
        return functional.conv2d(x, filters, bias, stride, padding, groups=groups)
