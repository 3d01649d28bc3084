"""Networks with a leading agent axis: those that a configuration can name, and their first architectures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from evorl.config import Network as NetworkSettings
from evorl.envs.spaces import ObservationSpecs
from evorl.networks.dense import ACTIVATIONS
from evorl.networks.module import module_network
from evorl.networks.recurrent import CELLS
from evorl.networks.stack import Network
from evorl.networks.standard import standard_network
from evorl.types import Architecture, Branches, Convolution, Head


class NetworkFactory(Protocol):
    """Makes a network that reads `parts`, normalises the vectors named in `normalized`, and has these heads.

    `noise` is the initial noise scale of noisy layers (arXiv 1706.10295), None without them. Raises UserError if the
    network cannot do that.
    """

    def __call__(
        self,
        settings: NetworkSettings,
        parts: ObservationSpecs,
        heads: Sequence[Head],
        normalized: Collection[str],
        noise: float | None = None,
    ) -> Network: ...


NETWORKS: Mapping[str, NetworkFactory] = {"standard": standard_network, "module": module_network}


def initial_architecture(
    settings: NetworkSettings, parts: ObservationSpecs, branches: Branches = "shared"
) -> Architecture:
    """The architecture that the configuration gives to a network of these observation parts, before any mutation."""
    if settings.name == "module":
        return Architecture()
    images = any(part.kind == "image" for part in parts.values())
    layers = [Convolution(**layer.model_dump()) for layer in settings.convolutions] if images else []
    return Architecture(
        hidden_sizes=settings.hidden_sizes,
        residual_layers=(0,) * len(settings.hidden_sizes),
        activation=settings.activation,
        layer_norm=bool(settings.layer_norm),
        branches=branches,
        convolutions=tuple(layers),
        recurrent=settings.recurrent,
        recurrent_size=settings.recurrent_size if settings.recurrent else 0,
    )


__all__ = ["ACTIVATIONS", "CELLS", "NETWORKS", "Network", "NetworkFactory", "initial_architecture"]
