"""Adam for a stack of agents, each with settings of its own. Axes: P agents, D all values of a stack."""

from __future__ import annotations

import torch
from torch import Tensor

from evorl.networks.parameters import FlatTensors, Shape

BETAS = (0.9, 0.999)
EPSILON = 1e-8


class StackedAdam:
    """Adam (arXiv 1412.6980) with gradient clipping by each agent's own norm.

    `mean` and `square` are the moments, `updates` [P] the steps taken; `beta1`, `beta2` and `epsilon` are [P].
    """

    def __init__(self, shapes: dict[str, Shape], agents: int, device: torch.device) -> None:
        self.mean = FlatTensors(shapes, agents, device)
        self.square = FlatTensors(shapes, agents, device)
        # In double precision: 1 - beta2**updates loses five digits in single.
        self.updates, self.beta1, self.beta2, self.epsilon = (
            torch.full((agents,), value, dtype=torch.float64, device=device) for value in (0.0, *BETAS, EPSILON)
        )
        self._agent = self.mean.agent_index()
        size = self._agent.numel()
        self._coefficients = torch.empty(5, size, device=device)
        self._work = torch.empty(2, size, device=device)

    @torch.no_grad()
    def step(
        self, parameters: Tensor, gradient: Tensor, learning_rate: Tensor, max_grad_norm: Tensor, due: Tensor
    ) -> None:
        """Update flat `parameters` [D] in place from the flat `gradient` [D]; the rest is [P].

        An agent whose `due` is 0 keeps its parameters and moments: its coefficients are zero, which costs nothing.
        """
        self.updates += due
        correction1 = 1 - self.beta1**self.updates
        correction2 = (1 - self.beta2**self.updates).sqrt()
        # Bias corrections of an agent that has never been updated are 0; it is not due, so any divisor will do.
        learning_rate = due * learning_rate * correction2 / correction1.clamp(min=1e-12)
        clip = (max_grad_norm / self.norms(gradient).clamp(min=1e-12)).clamp(max=1.0)
        per_agent = torch.stack(
            (clip, due * (1 - self.beta1), due * (1 - self.beta2), learning_rate, self.epsilon * correction2)
        )
        torch.index_select(per_agent.to(gradient), 1, self._agent, out=self._coefficients)
        scale, mean_weight, square_weight, rate, epsilon = self._coefficients
        scaled, denominator = self._work
        torch.mul(gradient, scale, out=scaled)
        self.mean.flat.lerp_(scaled, mean_weight)
        scaled.square_()
        self.square.flat.lerp_(scaled, square_weight)
        torch.sqrt(self.square.flat, out=denominator)
        denominator.add_(epsilon)
        torch.mul(self.mean.flat, rate, out=scaled)
        parameters.addcdiv_(scaled, denominator, value=-1)

    def norms(self, gradient: Tensor) -> Tensor:
        """The norm [P] of each agent's part of a flat gradient [D]."""
        squares = gradient.new_zeros(self.mean.agents)
        offset = 0
        for view in self.mean.views.values():
            part = gradient[offset : offset + view.numel()].view(self.mean.agents, -1)
            squares += torch.linalg.vector_norm(part, dim=1).square_()
            offset += view.numel()
        return squares.sqrt_()
