"""Representations of action values: the mean, a categorical distribution, or quantiles of the return.

Axes: P agents, B batch, A actions, N atoms (network outputs per action).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from evorl.algorithms.functional import (
    bootstrapped_atoms,
    bootstrapped_return,
    categorical_projection,
    cross_entropy,
    quantile_huber,
)
from evorl.config.off_policy import DQNSettings
from evorl.types.batches import Loss

Columns = Mapping[str, Tensor]
REGRESSION_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": partial(functional.mse_loss, reduction="none"),
    "huber": partial(functional.huber_loss, reduction="none"),
}
"""Losses [P, B] of values [P, B] and their targets [P, B]."""
TOLERANCE = 1e-4
"""Share of the support's width by which a return may lie outside of it without a warning; rounding errors are less."""


class Values(ABC):
    """A representation of action values by N `atoms` for each action."""

    atoms: int = 1
    """N, the number of network outputs per action."""
    metrics: tuple[str, ...] = ("td_error", "q_values")
    """Names of the metrics that the loss reports."""

    @abstractmethod
    def mean(self, atoms: Tensor) -> Tensor:
        """The expected returns [...] represented by atoms [..., N]."""

    @abstractmethod
    def loss(self, atoms: Tensor, next_atoms: Tensor, columns: Columns, discount: Tensor) -> Loss:
        """Temporal-difference loss [P, B] of the chosen actions' `atoms` [P, B, N].

        `next_atoms` [P, B, N] are those of the next actions, `columns` those of the batch, and `discount` [P] applies
        if they have no `discount`.
        """


class MeanValues(Values):
    """Represents an action value by its mean."""

    def __init__(self, settings: DQNSettings) -> None:
        self._loss = REGRESSION_LOSSES[settings.loss]

    def mean(self, atoms: Tensor) -> Tensor:
        return atoms.squeeze(-1)

    def loss(self, atoms: Tensor, next_atoms: Tensor, columns: Columns, discount: Tensor) -> Loss:
        q_of_action = atoms.squeeze(-1)
        target = bootstrapped_return(columns, discount, next_atoms.squeeze(-1))
        errors = q_of_action.detach() - target
        per_sample = self._loss(q_of_action, target)
        return Loss(per_sample, lambda: {"td_error": errors.abs(), "q_values": q_of_action}, errors)


class CategoricalValues(Values):
    """Represents returns by logits on a fixed support (C51, arXiv 1707.06887). Priorities use the cross-entropy.

    Rainbow (arXiv 1710.02298) uses the KL divergence, which is the cross-entropy minus the entropy of the target.
    """

    metrics = (*Values.metrics, "outside_support")

    def __init__(self, settings: DQNSettings) -> None:
        self.atoms = settings.categorical.atoms
        self._ends = settings.categorical.v_min, settings.categorical.v_max

    def mean(self, atoms: Tensor) -> Tensor:
        return atoms.softmax(-1) @ self._support(atoms)

    def loss(self, atoms: Tensor, next_atoms: Tensor, columns: Columns, discount: Tensor) -> Loss:
        returns = bootstrapped_atoms(columns, discount, self._support(atoms).expand_as(next_atoms))
        probabilities = next_atoms.softmax(-1)
        per_sample = cross_entropy(atoms, categorical_projection(probabilities, returns, *self._ends))

        def metrics() -> dict[str, Tensor]:
            q_of_action, target = self.mean(atoms), (probabilities * returns).sum(-1)
            low, high = self._ends
            slack = TOLERANCE * (high - low)
            outside = ((target < low - slack) | (target > high + slack)).float()
            return {"td_error": (target - q_of_action).abs(), "q_values": q_of_action, "outside_support": outside}

        return Loss(per_sample, metrics, per_sample.detach())

    def _support(self, like: Tensor) -> Tensor:
        return torch.linspace(*self._ends, self.atoms, device=like.device)


class QuantileValues(Values):
    """Represents returns by quantiles (QR-DQN, arXiv 1710.10044). Priorities use the loss."""

    def __init__(self, settings: DQNSettings) -> None:
        self.atoms = settings.quantile.quantiles
        self._kappa = settings.quantile.kappa

    def mean(self, atoms: Tensor) -> Tensor:
        return atoms.mean(-1)

    def loss(self, atoms: Tensor, next_atoms: Tensor, columns: Columns, discount: Tensor) -> Loss:
        target = bootstrapped_atoms(columns, discount, next_atoms)
        per_sample = quantile_huber(atoms, target, self._kappa)

        def metrics() -> dict[str, Tensor]:
            q_of_action = self.mean(atoms)
            return {"td_error": (self.mean(target) - q_of_action).abs(), "q_values": q_of_action}

        return Loss(per_sample, metrics, per_sample.detach())


VALUES: Mapping[str, Callable[[DQNSettings], Values]] = {
    "none": MeanValues,
    "categorical": CategoricalValues,
    "quantile": QuantileValues,
}
"""The representation for each setting of `distribution`."""
