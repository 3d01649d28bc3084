"""The founders of a population: hyperparameters and sizes sampled from the search space."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from evorl.config import ArchitectureLimits
from evorl.config.fields import HyperparameterRange
from evorl.types import Architecture


def sample_hyperparameters(
    hyperparameters: Mapping[str, float], ranges: Mapping[str, HyperparameterRange], rng: np.random.Generator
) -> dict[str, float]:
    """Return the hyperparameters, with those that have a range sampled uniformly from it on its scale."""
    return {**hyperparameters, **{name: range.at(rng.random()) for name, range in ranges.items()}}


def sample_sizes(shape: Architecture, limits: ArchitectureLimits, rng: np.random.Generator) -> Architecture:
    """Return an architecture with the same layers, whose units and channels are sampled log-uniformly."""
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
