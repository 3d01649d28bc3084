"""Windows of several steps, found at sampling time. Axes: P agents, B batch, U updates, n steps of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evorl.replay.ring import Found, Ring
from evorl.types import Agent, UserError

Returns = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The algorithm's part: from rewards [..., P, B, n] of windows, the steps [..., P, B] that each window has, and
discounts [P] to the return of those steps and the discount of the state after them, both [..., P, B]."""


class Windows(Protocol):
    """Gives what a batch holds of the drawn slots."""

    def begin(self, agents: Sequence[Agent]) -> None:
        """Start a generation of these agents."""

    def gather(self, slots: Tensor) -> Found:
        """Return what the windows [U, P, B] hold that begin at `slots` [U, P, B]."""


class OneStep:
    """Gives transitions as they were stored; each loss discounts by itself."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def begin(self, agents: Sequence[Agent]) -> None:
        """Do nothing: transitions are the same for all agents."""

    def gather(self, slots: Tensor) -> Found:
        """Return the transitions [U, P, B] at `slots` [U, P, B]."""
        return self._ring.gather(slots)


class NStep:
    """Gives windows of up to `n` steps of one stream as single transitions, for n-step returns (arXiv 1710.02298).

    A window ends with its episode, where its stream breaks or a step was dropped, and at the newest row; its slot can
    be drawn at once, as shorter windows have right returns too, and all draws stay equally likely. `reward` is the
    return of its steps and `terminated` that of its last one, whose next observation is the window's, also where it
    was truncated. The column `discount` is the factor of what follows: gamma^k after k steps.
    """

    def __init__(self, ring: Ring, n: int, returns: Returns) -> None:
        """Raises UserError where the ring has fewer rows than `n`."""
        if n > ring.rows:
            raise UserError(
                f"replay.n_step: windows of {n} steps are longer than the {ring.rows} steps of each environment that "
                f"replay.capacity keeps on a process; take replay.n_step={ring.rows} at most, or a larger capacity"
            )
        self._ring = ring
        self._n = n
        self._returns = returns
        self._steps = torch.arange(n, device=ring.device)
        self._gamma: Tensor

    def begin(self, agents: Sequence[Agent]) -> None:
        """Note the discount of each agent."""
        gamma = [agent.hyperparameters["gamma"] for agent in agents]
        self._gamma = torch.tensor(gamma, device=self._ring.device)

    def gather(self, slots: Tensor) -> Found:
        """Return the windows [U, P, B] that begin at `slots` [U, P, B]."""
        ring = self._ring
        steps = ring.window_end(slots, self._n)
        last = ring.following(slots, steps - 1)
        columns = ring.gather_columns(slots, [name for name in ring.columns if name not in ("reward", "terminated")])
        columns |= ring.gather_columns(last, ["terminated"])
        along = ring.following(slots.unsqueeze(-1), self._steps)
        rewards = ring.gather_columns(along, ["reward"])["reward"]
        columns["reward"], columns["discount"] = self._returns(rewards, steps, self._gamma)
        return Found(ring.observation(slots), ring.next_observation(last), columns)


def make_windows(ring: Ring, n: int, returns: Returns) -> Windows:
    """Return windows of `n` steps, whose `returns` are the algorithm's."""
    return OneStep(ring) if n == 1 else NStep(ring, n, returns)
