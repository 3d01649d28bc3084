"""The first agents of a search: hyperparameters and sizes drawn from the ranges in which it moves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from evorl.config import ArchitectureLimits
from evorl.config.fields import HyperparameterRange
from evorl.types import Architecture


def sample_hyperparameters(
    hyperparameters: Mapping[str, float], ranges: Mapping[str, HyperparameterRange], rng: np.random.Generator
) -> dict[str, float]:
    """Return hyperparameters of which those with a range are drawn evenly from it, on its scale."""
    return {**hyperparameters, **{name: range.at(rng.random()) for name, range in ranges.items()}}


def sample_sizes(shape: Architecture, limits: ArchitectureLimits, rng: np.random.Generator) -> Architecture:
    """Return an architecture of as many layers, whose units and channels are drawn evenly on a logarithmic scale."""
    bounds = {
        "hidden": (limits.min_units, limits.max_units),
        "recurrent": (limits.min_units, limits.max_units),
        "channels": (limits.min_channels, limits.max_channels),
    }
    for group in shape.sizes():
        if ends := bounds.get(group.split(".")[0]):
            low, high = ends
            shape = shape.resized(group, round(low * (high / low) ** rng.random()))
    return shape
