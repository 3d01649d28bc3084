"""Networks with a leading agent axis: those that a configuration can name, and their first architectures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from evorl.config import Network as NetworkSettings
from evorl.config.learning import DEFAULT_CONVOLUTIONS, ConvolutionalLayer
from evorl.envs.spaces import ObservationSpecs
from evorl.networks.dense import ACTIVATIONS
from evorl.networks.module import module_network
from evorl.networks.recurrent import CELLS
from evorl.networks.stack import Network
from evorl.networks.standard import standard_network
from evorl.types.agents import Architecture, Branches, Convolution, Head

NetworkFactory = Callable[[NetworkSettings, ObservationSpecs, Sequence[Head], Collection[str], float | None], Network]
"""Makes a network (settings, parts, heads, normalized, noise): it reads `parts`, normalises the vectors named in
`normalized`, and has these heads. `noise` is the initial noise scale of noisy layers (arXiv 1706.10295), None without
them. Raises UserError if the network cannot do that."""
NETWORKS: Mapping[str, NetworkFactory] = {"standard": standard_network, "module": module_network}


def convolutions_for(parts: ObservationSpecs) -> tuple[ConvolutionalLayer, ...]:
    """Return the default convolutional layers for the smallest image among the parts; none if there is no image."""
    sides = [min(part.image_size) for part in parts.values() if part.kind == "image"]
    return next((layers for side, layers in DEFAULT_CONVOLUTIONS.items() if sides and min(sides) >= side), ())


def small_image_setting(parts: ObservationSpecs) -> str | None:
    """Return the default layers as a setting if an image is too small for those of Mnih et al. (2015), else None."""
    layers = convolutions_for(parts)
    if not layers or layers == next(iter(DEFAULT_CONVOLUTIONS.values())):
        return None
    texts = [f"{{{', '.join(f'{key}: {value}' for key, value in layer)}}}" for layer in layers]
    return f"'network.convolutions=[{', '.join(texts)}]'"


def initial_architecture(settings: NetworkSettings, parts: ObservationSpecs, branches: Branches) -> Architecture:
    """The architecture that the configuration gives to a network of these observation parts, before any mutation."""
    if settings.name == "module":
        return Architecture()
    layers = convolutions_for(parts) if settings.convolutions is None else settings.convolutions
    images = any(part.kind == "image" for part in parts.values())
    return Architecture(
        hidden_sizes=settings.hidden_sizes,
        residual_layers=(0,) * len(settings.hidden_sizes),
        activation=settings.activation,
        layer_norm=bool(settings.layer_norm),
        branches=branches,
        convolutions=tuple(Convolution(**layer.model_dump()) for layer in layers) if images else (),
        recurrent=settings.recurrent,
        recurrent_size=settings.recurrent_size if settings.recurrent else 0,
    )


__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "NETWORKS",
    "Network",
    "NetworkFactory",
    "initial_architecture",
    "small_image_setting",
]
