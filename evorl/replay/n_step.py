"""N-step windows, assembled at sampling time. Axes: P agents, B batch, U updates, n steps of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evorl.replay.ring import Found, Ring
from evorl.types import Agent, UserError

Returns = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The algorithm's n-step return. Takes rewards [..., P, B, n], window lengths in steps [..., P, B] and discounts [P];
gives the return of those steps and the bootstrap discount of the state after them, both [..., P, B]."""


class Windows(Protocol):
    """Turns drawn slots into the transitions of a batch."""

    def begin(self, agents: Sequence[Agent]) -> None:
        """Start a generation with these agents."""

    def gather(self, slots: Tensor) -> Found:
        """Return the transitions [U, P, B] of the windows that begin at `slots` [U, P, B]."""


class OneStep:
    """One-step transitions as stored; each loss applies its own discount."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def begin(self, agents: Sequence[Agent]) -> None:
        """Do nothing: one-step transitions do not depend on the agent."""

    def gather(self, slots: Tensor) -> Found:
        """Return the transitions [U, P, B] at `slots` [U, P, B]."""
        return self._ring.gather(slots)


class NStep:
    """Windows of up to `n` steps of one stream as single transitions, for n-step returns (arXiv 1710.02298).

    A window is cut at the end of its episode, at a discontinuity or a dropped step of its stream, and at the newest
    row. Its first slot can be drawn immediately: shorter windows give correct returns too, and all slots stay equally
    likely. `reward` is the n-step return; `terminated` and the next observation are those of the last step, also where
    that was truncated. The column `discount` is the bootstrap factor: gamma^k after k steps.
    """

    def __init__(self, ring: Ring, n: int, returns: Returns) -> None:
        """Raises UserError if the ring has fewer rows than `n`."""
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
        """Read each agent's discount gamma."""
        gamma = [agent.hyperparameters["gamma"] for agent in agents]
        self._gamma = torch.tensor(gamma, device=self._ring.device)

    def gather(self, slots: Tensor) -> Found:
        """Return the n-step transitions [U, P, B] that begin at `slots` [U, P, B]."""
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
    """Return n-step windows, or one-step transitions for n = 1; `returns` computes the algorithm's returns."""
    return OneStep(ring) if n == 1 else NStep(ring, n, returns)
