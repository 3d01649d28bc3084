"""Episode returns, without bias towards short episodes. Axes: T steps, P agents, E environments, N episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.types.tensors import Tensors

Floats = NDArray[np.float64]

COUNTED_AT_ONCE = 128
"""Steps that are counted together: a call for each would take longer than all that it computes."""


class Collected(NamedTuple):
    """Counters of collected experience, each [P]: valid transitions, and sums over episodes.

    `returns` and `lengths` are sums over the `episodes` that count, `ended` is the number of all that ended.
    """

    steps: Floats
    returns: Floats
    episodes: Floats
    ended: Floats
    lengths: Floats


class Recent(NamedTuple):
    """Mean return and mean length of recently ended episodes, as means over agents of each agent's mean."""

    episodic_return: float
    episodic_length: float

    @classmethod
    def of(cls, sums: Floats) -> Recent | None:
        """The means, from each agent's number of episodes, returns and lengths [3, P]; None without any episode."""
        count, *totals = sums[:, sums[0] > 0]
        return cls(*(float(np.mean(total / count)) for total in totals)) if count.size else None


class Episodes:
    """Episode statistics of P agents with E environments each. The host waits for a device only when steps are counted.

    The mean return of the episodes that end within a time window is biased towards short episodes, because long ones
    are cut off at its end. So an episode counts only if it started at least as long ago as the longest duration seen so
    far in any of its agent's episodes, running ones included. All episodes that started by then have ended, whatever
    their length; as an episode's length is unknown when it starts, their mean is the mean over all episodes up to
    O(1/n) (Wald's identity for stopped sums).

    An episode belongs to an agent if that agent acted in it from the start.
    """

    def __init__(self, agents: int, num_envs: int, device: torch.device | str = "cpu", resets: int = 0) -> None:
        """Each episode but the first begins `resets` steps after the end of the one before."""
        self._shape, self._device, self._resets = (agents, num_envs), torch.device(device), resets
        self._owners = torch.full((agents,), -1, dtype=torch.int64)
        self.restart()

    def restart(self) -> None:
        """Start new episodes in all environments and clear the statistics."""
        agents, device = self._shape[0], self._device
        self._clock = 0
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._began = torch.zeros(self._shape, dtype=torch.int64, device=device)
        self._owned = torch.ones(self._shape, dtype=torch.bool, device=device)
        self._return = torch.zeros(self._shape, dtype=torch.float64, device=device)
        self._longest = torch.zeros(agents, dtype=torch.int64, device=device)
        self._ended = torch.zeros(agents, dtype=torch.int64, device=device)
        # Owned episodes that ended but do not count yet [4, N]: agent, start time, length, return.
        self._waiting = torch.zeros(4, 0, dtype=torch.float64, device=device)
        # Each agent's number, returns and lengths of all episodes that ended since the last call of `recent`.
        self._lately = torch.zeros(3, agents, dtype=torch.float64, device=device)

    def hand_over(self, owners: Sequence[int]) -> None:
        """Assign the environments to agents with these ids [P]; a running episode whose agent changes is neither's."""
        self._count()
        new = torch.tensor(owners)
        changed = ((self._owners != new) & (self._owners >= 0)).to(self._device)
        self._owners = new
        # An episode that starts at this step, or after a reset, belongs to the new agent from its first action.
        self._owned = self._owned & (~changed[:, None] | (self._began >= self._clock))
        self._longest = self._longest.masked_fill(changed, 0)
        self._waiting = self._waiting[:, ~changed[self._waiting[0].long()]]

    def step(self, reward: Tensor, ended: Tensor) -> None:
        """Record the rewards [P, E] of one step, and where an episode ended. The tensors must not change afterwards."""
        self._pending.append((reward, ended))
        if len(self._pending) == COUNTED_AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count the episodes that ended in the pending steps."""
        if not self._pending:
            return
        rewards, ends = zip(*self._pending, strict=True)
        self._pending = []
        ended = torch.stack(ends)
        # Episodes are numbered in each environment, from 0 for the one that ran before these steps.
        number = ended.cumsum(0) - ended.long()
        returns = torch.zeros(len(rewards) + 1, *self._shape, dtype=torch.float64, device=self._device)
        returns[0] = self._return
        returns.scatter_add_(0, number, torch.stack(rewards).double())
        time, agent, env = ended.nonzero(as_tuple=True)
        episode, time = number[time, agent, env], time + self._clock + 1
        start = torch.zeros(returns.shape, dtype=torch.int64, device=self._device)
        start[0] = self._began
        start[episode + 1, agent, env] = time + self._resets

        began, owned = start[episode, agent, env], self._owned[agent, env] | (episode > 0)
        new = torch.stack((agent, began, time - began)).double()
        new = torch.cat((new, returns[episode, agent, env][None]))
        self._lately.index_add_(1, agent, torch.cat((torch.ones_like(new[:1]), new[3:], new[2:3])))
        self._ended = self._ended + agent.bincount(minlength=self._shape[0])
        self._longest = self._longest.scatter_reduce(0, agent, (time - began).where(owned, 0), "amax")
        self._waiting = torch.cat((self._waiting, new[:, owned]), 1)
        self._clock += len(rewards)
        running = (number[-1] + ended[-1].long())[None]
        self._began, self._return = start.gather(0, running)[0], returns.gather(0, running)[0]
        self._owned = self._owned | (running[0] > 0)

    def pop(self) -> tuple[Floats, Floats, Floats, Floats]:
        """The returns, episodes, ended and lengths of `Collected` since the last call."""
        self._count()
        # A running episode lasts at least one more step.
        running = (self._clock - self._began + 1).where(self._owned, 0)
        self._longest = torch.maximum(self._longest, running.amax(1))
        agent = self._waiting[0].long()
        counts = self._waiting[1] <= self._clock - self._longest[agent]
        _, _, length, total = self._waiting[:, counts]
        sums = torch.zeros(3, self._shape[0], dtype=torch.float64, device=self._device)
        sums.index_add_(1, agent[counts], torch.stack((total, torch.ones_like(total), length)))
        self._waiting = self._waiting[:, ~counts]
        ended, self._ended = self._ended.double().cpu().numpy(), torch.zeros_like(self._ended)
        returns, episodes, lengths = sums.cpu().numpy()
        return returns, episodes, ended, lengths

    def recent(self) -> Recent | None:
        """The means over all episodes that ended since the last call, or None if none did.

        These are available earlier than those of `pop`, but each agent's is biased towards short episodes.
        """
        self._count()
        sums, self._lately = self._lately.cpu().numpy(), torch.zeros_like(self._lately)
        return Recent.of(sums)

    def state_dict(self) -> Tensors:
        """Tensors by name, of which none changes later; start times are relative to the present.

        The sums for `recent` are left out: they depend on when it was last called, which the clock decides.
        """
        self._count()
        present = torch.tensor([0, self._clock, 0, 0], dtype=torch.float64, device=self._device)
        return {
            "owners": self._owners,
            "ages": self._clock - self._began,
            "owned": self._owned,
            "returns": self._return,
            "longest": self._longest,
            "ended": self._ended,
            "waiting": self._waiting - present[:, None],
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict`, of checked shapes and dtypes."""
        self.restart()
        self._owners, self._began = state["owners"].cpu(), -state["ages"]
        names = ("owned", "returns", "longest", "ended", "waiting")
        self._owned, self._return, self._longest, self._ended, self._waiting = (state[name] for name in names)
