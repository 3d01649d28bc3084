"""The `network` section: the architectures of initial agents."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from evorl.config.fields import Initialisation, Plain, Section, Text, Width

MAX_WEIGHTS = 2**28
"""Between the first layers of a network; with its target and Adam's moments that is 4 GiB for each agent."""


class ConvolutionalLayer(Section):
    """A convolution without bounds on the image, followed by the network's activation."""

    channels: Annotated[int, Field(ge=1, le=4096)]
    """The channels that it puts out."""
    kernel: Annotated[int, Field(ge=1, le=64)]
    """The width and height of its kernel."""
    stride: Annotated[int, Field(ge=1, le=64)] = 1
    """The step from one place of the kernel to the next."""


class Network(Section):
    """The networks of initial agents; an algorithm may have several, which all begin so."""

    name: Text = "standard"
    """`standard`, which reads every observation, or `module` for a network of your own; see `factory`."""
    hidden_sizes: Annotated[tuple[Width, ...], Field(min_length=1, max_length=256)] = (64, 64)
    """The units of each hidden layer; those of the initial agents, where mutations change them."""
    activation: Text = "relu"
    """The activation of hidden layers and convolutions: `relu`, `tanh`, `elu`, `gelu` or `silu`."""
    layer_norm: bool | None = None
    """Normalise hidden layers (arXiv 1607.06450). Null is what the algorithm takes: true for DQN, else false."""
    initialisation: Initialisation | None = None
    """Null is what the algorithm takes: `orthogonal` for actor-critics, `uniform` for DQN."""
    convolutions: Annotated[tuple[ConvolutionalLayer, ...], Field(min_length=1, max_length=64)] = (
        ConvolutionalLayer(channels=32, kernel=8, stride=4),
        ConvolutionalLayer(channels=64, kernel=4, stride=2),
        ConvolutionalLayer(channels=64, kernel=3, stride=1),
    )
    """The convolutional layers that read images, where there are any (Mnih et al. 2015)."""
    bf16: bool | None = None
    """Multiply in bfloat16 in hidden layers and convolutions; parameters and the optimiser stay in float32. Null is
    what Accelerate was asked for, by its `mixed_precision: bf16`."""
    recurrent: Text | None = None
    """A recurrent cell after the hidden layers: `lstm` or `gru`."""
    recurrent_size: Width = 64
    """The units of the recurrent cell."""
    factory: Plain | None = None
    """For `name: module`: `package.module:function`, called with (inputs, outputs), returns an `nn.Module`; `inputs` is
    the width of a vector or the shape of an image."""

    @model_validator(mode="after")
    def _factory_where_it_belongs(self) -> Self:
        if (self.name == "module") != (self.factory is not None):
            raise ValueError("`factory` and `name: module` go together")
        if self.name == "module" and self.recurrent:
            raise ValueError(f"a module has no recurrent state; leave `recurrent: {self.recurrent}` out")
        if self.name == "module" and self.initialisation:
            raise ValueError(f"a module initialises itself; leave `initialisation: {self.initialisation}` out")
        return self

    @model_validator(mode="after")
    def _fits_into_memory(self) -> Self:
        layers = pairwise(self.convolutions)
        weights = {
            "hidden_sizes": sum(before * after for before, after in pairwise(self.hidden_sizes)),
            "convolutions": sum(before.channels * after.channels * after.kernel**2 for before, after in layers),
        }
        for name, count in weights.items():
            if count > MAX_WEIGHTS:
                raise ValueError(f"{name} have {count} weights between them; they may have at most {MAX_WEIGHTS}")
        return self
