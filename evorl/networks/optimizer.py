"""Adam on flat buffers, with per-agent settings. Axes: P agents, D values of a stack."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import torch
from torch import Tensor

from evorl.kernels.library import Kernel
from evorl.networks.flat import FlatTensors
from evorl.system.formats import load_like
from evorl.types.tensors import Tensors

BETAS = (0.9, 0.999)
WEIGHTS = tuple(1 - beta for beta in BETAS)
TINY = 1e-30


class StackedAdam:
    """Adam (arXiv 1412.6980) with per-agent learning rates and clipping.

    `exp_avg` and `exp_avg_sq` are the first and second moments, `updates` [P] the steps that each agent has taken.
    """

    def __init__(self, parameters: FlatTensors, gradient: Tensor, epsilon: float, kernel: Kernel | None = None) -> None:
        """Steps change `parameters` and may overwrite the flat `gradient` [D]. On a CPU, a `kernel` takes them."""
        shapes, agents, device = parameters.shapes, parameters.agents, parameters.flat.device
        self.parameters, self.gradient = parameters, gradient
        self._kernel = kernel if device.type == "cpu" else None
        self._sizes = array("q", [math.prod(shape) for shape in shapes.values()])
        self._gradient_rows = parameters.rows(gradient)
        self.exp_avg = FlatTensors(shapes, agents, device)
        self.exp_avg_sq = FlatTensors(shapes, agents, device)
        self._epsilon = epsilon
        # float64, because 1 - beta2**updates loses five digits in float32.
        self.updates = torch.zeros(agents, dtype=torch.float64, device=device)
        if self._kernel is not None:
            self._squares = torch.empty(agents, dtype=torch.float64)
            return
        self._tau = self._target_weights = torch.zeros(0)
        # A row of ones goes with the learning rates.
        self._rates = torch.ones(2, agents, device=device)
        self._numbers = torch.empty(2, agents, device=device)
        size = gradient.numel()
        spread = torch.empty(2, size, device=device)
        self._spread_rows = parameters.rows(spread)
        self._spread, self._scratch = spread, torch.empty(2, size, device=device)
        self._tiny = torch.tensor(TINY, device=device)

    def state_dict(self) -> Tensors:
        """The moments, and each agent's steps [P]."""
        return {"mean": self.exp_avg.flat, "square": self.exp_avg_sq.flat, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict` of the same agents. Raises UserError for another one."""
        load_like(state, self.state_dict(), "the optimiser")

    def norms(self) -> Tensor:
        """Each agent's gradient norm [P]."""
        if self._kernel is not None:
            self._kernel.squares(self._sizes, self.gradient, self._squares)
            return self._squares.sqrt().float()
        parts = [torch.linalg.vector_norm(row, dim=1) for row in self._gradient_rows]
        norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        return norms

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply each agent's gradient by a factor [P]."""
        column = factor.unsqueeze(-1)
        for row in self._gradient_rows:
            row *= column

    def step(self, learning_rate: Tensor, active: Tensor | None = None, clip: Tensor | None = None) -> None:
        """Update the parameters by the gradient times `clip` [P], with learning rates [P].

        Agents whose `active` [P] is 0 keep their parameters and moments. Without `active` all agents are updated.
        """
        self.updates += 1 if active is None else active
        if self._kernel is not None:
            flats = self.parameters.flat, self.exp_avg.flat, self.exp_avg_sq.flat, self.gradient
            mask = None if active is None else active.float()
            rate = learning_rate.float().contiguous()
            self._kernel.adam(self._sizes, flats, self.updates, self._epsilon, rate, clip, mask)
            return
        if clip is not None:
            self.scale_gradient(clip)
        self._rates[0] = learning_rate
        torch.mul(self._corrected(), self._rates, out=self._numbers)
        first: float | Tensor
        second: float | Tensor
        first, second = WEIGHTS
        if active is not None:
            # Last, and not by a product: gradients of inactive agents and their factors may be infinite or NaN.
            stopped = (active == 0).unsqueeze(-1)
            for row in self._gradient_rows:
                row.masked_fill_(stopped, 0.0)
            self._numbers[0] *= active
            first, second = (self.exp_avg.spread(active) * weight for weight in WEIGHTS)
        for row in self._spread_rows:
            row.copy_(self._numbers.unsqueeze(-1))
        (rates, epsilons), (scaled, denominator), gradient = self._spread, self._scratch, self.gradient
        exp_avg, exp_avg_sq = self.exp_avg.flat, self.exp_avg_sq.flat
        exp_avg.lerp_(gradient, first)
        # MKL takes ten times as long for the square root of zero, and half of the values may be zero.
        exp_avg_sq.lerp_(torch.addcmul(self._tiny, gradient, gradient, out=denominator), second)
        torch.sqrt(exp_avg_sq, out=denominator).add_(epsilons)
        self.parameters.flat.addcdiv_(torch.mul(exp_avg, rates, out=scaled), denominator, value=-1)

    def follow(self, target: FlatTensors, tau: Tensor) -> None:
        """Move each agent's `target` to its parameters by a share `tau` [P], which is spread again if it is another."""
        if self._kernel is not None:
            self._kernel.follow(self._sizes, target.flat, self.parameters.flat, tau)
            return
        if tau is not self._tau:
            self._tau, self._target_weights = tau, self.parameters.spread(tau)
        target.flat.lerp_(self.parameters.flat, self._target_weights)

    def _corrected(self) -> Tensor:
        """The factors [2, P] that correct the moments' bias: of step sizes, and epsilon times that of epsilons."""
        # An agent without updates is inactive; the clamp avoids 0 / 0 in its factors.
        steps = self.updates.clamp(min=1)
        first, second = (1 - beta**steps for beta in BETAS)
        root = second.sqrt()
        return torch.stack((root / first, self._epsilon * root))
