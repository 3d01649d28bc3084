"""Network specs of an algorithm, and update rules for target networks. Axes: P agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from evorl.networks import Network
from evorl.types import Architecture


class TargetRule(Protocol):
    """Update rule of a target network."""

    @property
    def changes(self) -> bool:
        """Return whether the rate depends on the number of updates."""

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        """Return the interpolation coefficient tau [P] for this update, given each agent's number of `updates` [P]."""


@dataclass(frozen=True)
class Polyak:
    """Polyak averaging (arXiv 1509.02971, section 3), with the per-agent coefficient `hyperparameter`.

    With `every` above 1, only at every `every`-th update of the agent.
    """

    hyperparameter: str
    every: int = 1

    @property
    def changes(self) -> bool:
        return self.every > 1

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        rate = hyperparameters[self.hyperparameter]
        return rate if self.every == 1 else rate * (torch.remainder(updates, self.every) == 0)


@dataclass(frozen=True)
class Periodic:
    """Periodic hard copy (Mnih et al. 2015), with the per-agent period `hyperparameter`, in updates."""

    hyperparameter: str
    changes: ClassVar[bool] = True

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        period = hyperparameters[self.hyperparameter].round().clamp(min=1)
        return (torch.remainder(updates, period) == 0).float()


@dataclass(frozen=True)
class NetworkSpec:
    """A network of an algorithm, its initial architecture, and the update rule of its target network, if any.

    Raises UserError if the architecture does not fit the network's inputs.
    """

    network: Network
    architecture: Architecture
    target: TargetRule | None = None

    def __post_init__(self) -> None:
        self.network.cost(self.architecture)
