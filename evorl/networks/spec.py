"""Network specifications of an algorithm: descriptions, and rules for target copies. Axes: P agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from evorl.networks import Network
from evorl.types import Architecture


class TargetRule(Protocol):
    """The rule by which a target copy follows the network it was copied from."""

    @property
    def changes(self) -> bool:
        """Tell whether the rate depends on the updates."""

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        """Return the share [P] of the way that the copy goes after an update, given each agent's `updates` [P]."""


@dataclass(frozen=True)
class Polyak:
    """Go a part of the way in each update (arXiv 1509.02971, section 3): the agents' own `hyperparameter`.

    With `every`, only in each so-many-th update of the agent.
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
    """Copy the network every so many updates (Mnih et al. 2015): the agents' own `hyperparameter`."""

    hyperparameter: str
    changes: ClassVar[bool] = True

    def rate(self, hyperparameters: Mapping[str, Tensor], updates: Tensor) -> Tensor:
        period = hyperparameters[self.hyperparameter].round().clamp(min=1)
        return (torch.remainder(updates, period) == 0).float()


@dataclass(frozen=True)
class NetworkSpec:
    """A network that an algorithm has, its architecture in new agents, and the rule of its target copy, if it has one.

    Raises UserError where the architecture does not fit what the network reads.
    """

    network: Network
    architecture: Architecture
    target: TargetRule | None = None

    def __post_init__(self) -> None:
        self.network.cost(self.architecture)
