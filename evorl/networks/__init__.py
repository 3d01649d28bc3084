"""Networks with a leading agent axis, and the registry of networks that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from evorl.config import Network as NetworkSettings
from evorl.envs.spaces import ObservationSpecs
from evorl.networks.base import Layout, Network, initial_architecture
from evorl.networks.layers import ACTIVATIONS, CELLS
from evorl.networks.module import module_network
from evorl.networks.standard import StandardNetwork
from evorl.types import Head

NETWORKS: Mapping[str, Callable[[NetworkSettings, ObservationSpecs, Sequence[Head], Collection[str]], Network]] = {
    "standard": lambda settings, parts, heads, normalized: StandardNetwork(
        parts, heads, normalized, settings.initialisation or "uniform", bool(settings.bf16)
    ),
    "module": lambda settings, parts, heads, normalized: module_network(
        settings.factory or "", parts, heads, normalized, bool(settings.bf16)
    ),
}
"""Map (settings, observation parts, heads, names of normalised vectors) to a network."""


__all__ = ["ACTIVATIONS", "CELLS", "NETWORKS", "Layout", "Network", "initial_architecture"]
