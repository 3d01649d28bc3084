"""Episode returns, without bias towards short episodes. Axes: T steps, P agents, E environments, K start times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.types.tensors import Tensors

Floats = NDArray[np.float64]

MOST_STEPS = 128
"""Steps that are counted at once: for 256 copies of a CartPole of tensors a step then takes a quarter less time."""


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
    """Mean return and mean length of recently ended episodes."""

    episodic_return: float
    episodic_length: float

    @classmethod
    def of(cls, sums: Floats) -> Recent | None:
        """The means, from the number of episodes and the sums of their returns and lengths [3]; None without any."""
        count, total, length = sums
        return cls(float(total / count), float(length / count)) if count else None


class Episodes:
    """Episode statistics of P agents with E environments each. The host reads a tensor once in `MOST_STEPS` steps.

    The mean return of the episodes that end within a time window is biased towards short episodes, because long ones
    are cut off at its end. So an episode counts only if it started at least as long ago as the longest duration seen so
    far in any of its agent's episodes, running ones included. All episodes that started by then have ended, whatever
    their length; as an episode's length is unknown when it starts, their mean is the mean over all episodes up to
    O(1/n) (Wald's identity for stopped sums). Ended episodes of an agent are therefore summed by their start time.

    An episode belongs to an agent if that agent acted in it from the start.
    """

    def __init__(self, agents: int, num_envs: int, device: torch.device | str = "cpu", resets: int = 0) -> None:
        """Each episode but the first begins `resets` steps after the end of the one before."""
        self._shape, self._device, self._resets = (agents, num_envs), torch.device(device), resets
        self._owners = torch.full((agents,), -1, dtype=torch.int64)
        self._nowhere = torch.zeros(self._shape, dtype=torch.bool, device=device)
        self.restart()

    def restart(self) -> None:
        """Start new episodes in all environments and clear the statistics."""
        agents, device = self._shape[0], self._device
        self._clock = self._oldest = 0
        self._pending: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._began = torch.zeros(self._shape, dtype=torch.int64, device=device)
        self._owned = ~self._nowhere
        self._return = torch.zeros(self._shape, dtype=torch.float64, device=device)
        self._longest = torch.zeros(agents, dtype=torch.int64, device=device)
        self._ended = torch.zeros(agents, dtype=torch.int64, device=device)
        # Returns, numbers and lengths of ended episodes that do not count yet, [3, P, K] from the oldest start time on.
        self._waiting = torch.zeros(3, agents, 0, dtype=torch.float64, device=device)
        # Returns, number and lengths of all episodes that ended since the last call of `recent`.
        self._lately = torch.zeros(3, dtype=torch.float64, device=device)

    def hand_over(self, owners: Sequence[int]) -> None:
        """Assign the copies to agents with these ids [P]; a running episode whose agent changes belongs to neither."""
        self._count()
        new = torch.tensor(owners)
        changed = ((self._owners != new) & (self._owners >= 0)).to(self._device)
        self._owners = new
        # An episode that starts at this step, or after a reset, belongs to the new agent from its first action.
        self._owned = self._owned & (~changed[:, None] | (self._began >= self._clock))
        self._longest = self._longest.masked_fill(changed, 0)
        self._waiting.masked_fill_(changed[:, None], 0.0)

    def step(self, reward: Tensor, ended: Tensor, dropped: Tensor | None = None) -> None:
        """Record the rewards [P, E] of one step, and where an episode ended or was dropped (never counted).

        The tensors must not change afterwards. An episode that was dropped is followed by one without a reset step.
        """
        self._pending.append((reward, ended, dropped))
        if len(self._pending) == MOST_STEPS:
            self._count()

    def _count(self) -> None:
        """Count the episodes that ended in the pending steps."""
        if not self._pending:
            return
        rewards, ends, drops = zip(*self._pending, strict=True)
        self._pending = []
        reward, ended = torch.stack(rewards).double(), torch.stack(ends)
        over = ended
        if any(drop is not None for drop in drops):
            over = ended | torch.stack([self._nowhere if drop is None else drop for drop in drops])
        # Episodes are numbered in each environment, from 0 for the one that ran before these steps.
        number = over.cumsum(0) - over.long()
        returns = torch.zeros(len(rewards) + 1, *self._shape, dtype=torch.float64, device=self._device)
        returns[0] = self._return
        returns.scatter_add_(0, number, reward)
        time, agent, env = over.nonzero(as_tuple=True)
        episode, has_ended = number[time, agent, env], ended[time, agent, env]
        time = time + self._clock + 1
        start = torch.zeros(returns.shape, dtype=torch.int64, device=self._device)
        start[0] = self._began
        start[episode + 1, agent, env] = time + self._resets * has_ended.long()

        time, agent, env, episode = (values[has_ended] for values in (time, agent, env, episode))
        began, owned = start[episode, agent, env], self._owned[agent, env] | (episode > 0)
        length = time - began
        total = returns[episode, agent, env]
        numbers = torch.stack((total, torch.ones_like(total), length.double()))
        self._lately = self._lately + numbers.sum(1)
        self._ended = self._ended + agent.bincount(minlength=self._shape[0])
        agent, began, length = agent[owned], began[owned], length[owned]
        self._clock += len(rewards)
        self._make_room()
        room = self._waiting.shape[2]
        self._waiting.view(3, -1).index_add_(1, agent * room + began - self._oldest, numbers[:, owned])
        self._longest = self._longest.scatter_reduce(0, agent, length, "amax")
        running = (number[-1] + over[-1].long())[None]
        self._began, self._return = start.gather(0, running)[0], returns.gather(0, running)[0]
        self._owned = self._owned | (running[0] > 0)

    def _make_room(self) -> None:
        """Let `_waiting` reach to the present, and twice as far when it grows."""
        times = self._clock - self._oldest + 1 + self._resets
        if times > self._waiting.shape[2]:
            room = (3, self._shape[0], 2 * times - self._waiting.shape[2])
            self._waiting = torch.cat((self._waiting, self._waiting.new_zeros(room)), 2)

    def pop(self) -> tuple[Floats, Floats, Floats, Floats]:
        """The returns, episodes, ended and lengths of `Collected` since the last call."""
        self._count()
        # A running episode lasts at least one more step.
        running = (self._clock - self._began + 1).where(self._owned, 0)
        self._longest = torch.maximum(self._longest, running.amax(1))
        times = torch.arange(self._oldest, self._oldest + self._waiting.shape[2], device=self._device)
        counts = times <= (self._clock - self._longest)[:, None]
        returns, episodes, lengths = (self._waiting * counts).sum(2).cpu().numpy()
        ended = self._ended.double().cpu().numpy()
        self._ended = torch.zeros_like(self._ended)
        # No episode that may still count began earlier.
        first = max(self._oldest, self._clock - int(self._longest.max()))
        self._waiting = self._waiting.masked_fill(counts, 0.0)[:, :, first - self._oldest :].clone()
        self._oldest = first
        return returns, episodes, ended, lengths

    def recent(self) -> Recent | None:
        """The means over all episodes that ended since the last call, of any agent, or None if none did.

        These are available earlier than those of `pop`, but biased towards short episodes.
        """
        self._count()
        sums, self._lately = self._lately.cpu().numpy()[[1, 0, 2]], torch.zeros_like(self._lately)
        return Recent.of(sums)

    def state_dict(self) -> Tensors:
        """Tensors by name; `waiting` [3, P, K] ends at the present.

        The sums for `recent` are left out: they depend on when it was last called, which the clock decides.
        """
        self._count()
        return {
            "owners": self._owners,
            "ages": self._clock - self._began,
            "owned": self._owned,
            "returns": self._return,
            "longest": self._longest,
            "ended": self._ended,
            "waiting": self._waiting[:, :, : self._clock - self._oldest].clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict`, of checked shapes and dtypes."""
        self.restart()
        self._owners, self._began = state["owners"].cpu(), -state["ages"]
        names = ("owned", "returns", "longest", "ended", "waiting")
        self._owned, self._return, self._longest, self._ended, self._waiting = (state[name].clone() for name in names)
        self._oldest = -self._waiting.shape[2]
