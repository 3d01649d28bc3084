"""Adam for a stack of agents, each with settings of its own. Axes: P agents, D all values of a stack."""

from __future__ import annotations

import torch
from torch import Tensor

from evorl.networks.parameters import FlatTensors, Shape

BETAS = (0.9, 0.999)


class StackedAdam:
    """Adam (arXiv 1412.6980) with gradient clipping by each agent's own norm.

    `mean` and `square` are the moments, `updates` [P] the steps taken; `betas` are [2, P] and `epsilon` is [P].
    """

    def __init__(self, shapes: dict[str, Shape], agents: int, epsilon: float, device: torch.device) -> None:
        self.mean = FlatTensors(shapes, agents, device)
        self.square = FlatTensors(shapes, agents, device)
        # In double precision: 1 - beta2**updates loses five digits in single.
        self.updates = torch.zeros(agents, dtype=torch.float64, device=device)
        self.betas = torch.tensor(BETAS, dtype=torch.float64, device=device)[:, None].repeat(1, agents)
        self.epsilon = torch.full((agents,), epsilon, dtype=torch.float64, device=device)
        size = self.mean.flat.numel()
        self._coefficients = torch.empty(4, size, device=device)
        self._coefficient_rows = self.mean.rows(self._coefficients)
        self._work = torch.empty(2, size, device=device)
        self._scaled_rows = self.mean.rows(self._work[0])
        self._norms = torch.empty(len(shapes), agents, device=device)
        self._norm_rows = list(self._norms)

    @torch.no_grad()
    def step(
        self,
        parameters: Tensor,
        gradient: Tensor,
        learning_rate: Tensor,
        due: Tensor,
        max_grad_norm: Tensor | None = None,
    ) -> None:
        """Update flat `parameters` [D] in place from the flat `gradient` [D]; the rest is [P].

        An agent whose `due` is 0 keeps its parameters and moments: its coefficients are zero, which costs nothing.
        """
        # All in double precision from here: mixing it with single costs a copy in each operation.
        due, learning_rate = due.double(), learning_rate.double()
        self.updates += due
        # An agent that was never updated is not due either: corrections other than 0 keep 0 / 0 out of its parameters.
        corrections = 1 - self.betas ** self.updates.clamp(min=1)
        corrections[1].sqrt_()
        rate = due * learning_rate * corrections[1] / corrections[0]
        weights = (1 - self.betas) * due
        per_agent = torch.stack((*weights, rate, self.epsilon * corrections[1])).to(gradient).unsqueeze(-1)
        for row in self._coefficient_rows:
            row.copy_(per_agent)
        mean_weight, square_weight, rates, epsilons = self._coefficients
        scaled, denominator = self._work
        if max_grad_norm is not None:
            clip = (max_grad_norm / self.norms(gradient).clamp(min=1e-12)).clamp(max=1.0).unsqueeze(-1)
            for row, part in zip(self._scaled_rows, self.mean.rows(gradient), strict=True):
                torch.mul(part, clip, out=row)
            gradient = scaled
        self.mean.flat.lerp_(gradient, mean_weight)
        self.square.flat.lerp_(torch.mul(gradient, gradient, out=denominator), square_weight)
        torch.sqrt(self.square.flat, out=denominator).add_(epsilons)
        parameters.addcdiv_(torch.mul(self.mean.flat, rates, out=scaled), denominator, value=-1)

    def rows(self, gradient: Tensor) -> list[Tensor]:
        """Return the parts of a flat gradient [D], each [P, values of one parameter]."""
        return self.mean.rows(gradient)

    def norms(self, gradient: Tensor) -> Tensor:
        """Return the norm [P] of each agent's part of a flat gradient [D]."""
        for norm, part in zip(self._norm_rows, self.mean.rows(gradient), strict=True):
            torch.linalg.vector_norm(part, dim=1, out=norm)
        norms: Tensor = torch.linalg.vector_norm(self._norms, dim=0)
        return norms
