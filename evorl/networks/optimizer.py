"""Adam for a stack of agents, each with settings of its own. Axes: P agents, D all values of a stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evorl.networks.parameters import FlatTensors, Shape

BETAS = (0.9, 0.999)
WEIGHTS = tuple(1 - beta for beta in BETAS)
AHEAD = 64
TINY = 1e-30


class StackedAdam:
    """Adam (arXiv 1412.6980), with a step size of each agent's own.

    `mean` and `square` are the moments, `updates` [P] the steps taken.
    """

    def __init__(self, shapes: dict[str, Shape], agents: int, epsilon: float, device: torch.device) -> None:
        self.mean = FlatTensors(shapes, agents, device)
        self.square = FlatTensors(shapes, agents, device)
        self._epsilon = epsilon
        # In double precision: 1 - beta2**updates loses five digits in single.
        self._updates = torch.zeros(agents, dtype=torch.float64, device=device)
        self._common = 0
        # Factors of the steps to come, and the ones that stand beside the learning rates.
        self._ahead = torch.empty(0, 2, agents, dtype=torch.float64, device=device)
        self._rates = torch.ones(2, agents, device=device)
        self._numbers = torch.empty(2, agents, device=device)
        self._per_agent = self._numbers.unsqueeze(-1)
        size = self.mean.flat.numel()
        spread = torch.empty(2, size, device=device)
        self._spread, self._spread_rows = spread.unbind(), self.mean.rows(spread)
        self._work = torch.empty(2, size, device=device).unbind()
        self._tiny = torch.tensor(TINY, device=device)

    @property
    def updates(self) -> Tensor:
        """Return the steps [P] that each agent has taken."""
        return self._updates + self._common

    def load(self, updates: Tensor) -> None:
        """Take over how many steps [P] each agent has taken."""
        self._updates.copy_(updates)
        self._common, self._ahead = 0, self._ahead[:0]

    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: Tensor, active: Tensor | None = None) -> None:
        """Update flat `parameters` [D] in place by the flat `gradient` [D], which must be finite, and rates [P].

        Agents whose `active` [P] is 0 keep their parameters and moments; without it all are updated, for which the
        factors of 64 steps are computed at once: 12 operations of 3 us each where an update has about 60.
        """
        weights: Sequence[Tensor | float] = WEIGHTS
        self._rates[0] = learning_rate
        torch.mul(self._factors(active), self._rates, out=self._numbers)
        if active is not None:
            self._numbers[0] *= active
            spread = self.mean.spread(active)
            weights = [spread * weight for weight in WEIGHTS]
        for row in self._spread_rows:
            row.copy_(self._per_agent)
        rates, epsilons = self._spread
        scaled, denominator = self._work
        self.mean.flat.lerp_(gradient, weights[0])
        # MKL takes ten times as long for the root of zero, which half of the values may be.
        self.square.flat.lerp_(torch.addcmul(self._tiny, gradient, gradient, out=denominator), weights[1])
        torch.sqrt(self.square.flat, out=denominator).add_(epsilons)
        parameters.addcdiv_(torch.mul(self.mean.flat, rates, out=scaled), denominator, value=-1)

    def _factors(self, active: Tensor | None) -> Tensor:
        """Count a step, and return what the learning rates are multiplied by in it, and the epsilons: [2, P]."""
        if active is not None:
            self._updates += self._common
            self._updates += active
            self._common, self._ahead = 0, self._ahead[:0]
            return self._corrected(self._updates)
        place = self._common % AHEAD
        if not len(self._ahead) or place == 0:
            steps = torch.arange(1, AHEAD + 1, device=self._updates.device).unsqueeze(-1)
            self._ahead = self._corrected(self._updates + (self._common - place) + steps).transpose(0, 1)
        self._common += 1
        return self._ahead[place]

    def _corrected(self, updates: Tensor) -> Tensor:
        """Return the factors [2, ..., P] after so many steps [..., P] that correct the moments' bias towards zero."""
        # An agent that was never updated is not active either: corrections other than 0 keep 0 / 0 out of its values.
        steps = updates.clamp(min=1)
        first, second = (1 - beta**steps for beta in BETAS)
        root = second.sqrt()
        return torch.stack((root / first, self._epsilon * root))
