"""Episode returns on a device, without bias towards short episodes. Axes: P agents, E environments, K start times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evorl.envs.episodes import Floats, Recent
from evorl.types.tensors import Tensors

AT_FIRST = 256
"""Start times for which there is room at first."""


class TensorEpisodes:
    """The returns and lengths of `Episodes` as tensors: nothing is read by the host before `pop` and `recent`.

    `Episodes` keeps a list of the episodes that ended; here those of an agent are summed by their start time, which
    decides when they count.
    """

    def __init__(self, agents: int, num_envs: int, device: torch.device, resets: int = 0) -> None:
        """Each episode but the first begins `resets` steps after the end of the one before."""
        self._shape, self._device, self._resets = (agents, num_envs), device, resets
        self._owners = torch.full((agents,), -1, dtype=torch.int64)
        self.restart()

    def restart(self) -> None:
        """Start new episodes in all copies and clear the statistics."""
        agents, device = self._shape[0], self._device
        self._clock = self._oldest = 0
        self._began = torch.zeros(self._shape, dtype=torch.int64, device=device)
        self._owned = torch.ones(self._shape, dtype=torch.bool, device=device)
        self._return = torch.zeros(self._shape, dtype=torch.float64, device=device)
        self._longest = torch.zeros(agents, dtype=torch.int64, device=device)
        self._ended = torch.zeros(agents, dtype=torch.int64, device=device)
        # Returns, numbers and lengths of ended episodes that do not count yet, [3, P, K] from the oldest start time on.
        self._waiting = torch.zeros(3, agents, AT_FIRST, dtype=torch.float64, device=device)
        # Returns, number and lengths of all episodes that ended since the last call of `recent`.
        self._lately = torch.zeros(3, dtype=torch.float64, device=device)

    def hand_over(self, owners: Sequence[int]) -> None:
        """Assign the copies to agents with these ids [P]; a running episode whose agent changes belongs to neither."""
        new = torch.tensor(owners)
        changed = ((self._owners != new) & (self._owners >= 0)).to(self._device)
        self._owners = new
        # An episode that starts at this step, or after a reset, belongs to the new agent from its first action.
        self._owned &= ~changed[:, None] | (self._began >= self._clock)
        self._longest.masked_fill_(changed, 0)
        self._waiting.masked_fill_(changed[:, None], 0.0)

    def step(self, reward: Tensor, ended: Tensor) -> None:
        """Record the rewards [P, E] of one step, and where an episode ended."""
        if self._clock - self._oldest + self._resets >= self._waiting.shape[2]:
            self._waiting = torch.cat((self._waiting, torch.zeros_like(self._waiting)), 2)
        self._clock += 1
        self._return += reward
        length = self._clock - self._began
        numbers = torch.stack((self._return, torch.ones_like(self._return), length.double()))
        counted = ended & self._owned
        row = (self._began - self._oldest).clamp_(min=0)
        self._waiting.scatter_add_(2, row.expand(3, -1, -1), numbers.where(counted, 0.0))
        self._longest = torch.maximum(self._longest, length.where(counted, 0).amax(1))
        self._ended += ended.sum(1)
        self._lately += numbers.where(ended, 0.0).sum((1, 2))
        self._began.masked_fill_(ended, self._clock + self._resets)
        self._return.masked_fill_(ended, 0.0)
        self._owned |= ended

    def pop(self) -> tuple[Floats, Floats, Floats, Floats]:
        """The returns, episodes, ended and lengths of `Collected` since the last call."""
        # A running episode lasts at least one more step.
        running = (self._clock - self._began + 1).where(self._owned, 0)
        self._longest = torch.maximum(self._longest, running.amax(1))
        times = torch.arange(self._oldest, self._oldest + self._waiting.shape[2], device=self._device)
        counts = times <= (self._clock - self._longest)[:, None]
        returns, episodes, lengths = (self._waiting * counts).sum(2).cpu().numpy()
        ended = self._ended.double().cpu().numpy()
        self._ended.zero_()
        # No episode that may still count began earlier.
        first = max(self._oldest, self._clock - int(self._longest.max()))
        left = self._waiting.masked_fill(counts, 0.0)[:, :, first - self._oldest : self._clock - self._oldest + 1]
        self._waiting = torch.zeros_like(self._waiting[:, :, : max(AT_FIRST, left.shape[2])])
        self._waiting[:, :, : left.shape[2]] = left
        self._oldest = first
        return returns, episodes, ended, lengths

    def recent(self) -> Recent | None:
        """The means over all episodes that ended since the last call, of any agent, or None if none did.

        These are available earlier than those of `pop`, but biased towards short episodes.
        """
        sums = self._lately.cpu().numpy()[[1, 0, 2]]
        self._lately.zero_()
        return Recent.of(sums)

    def state_dict(self) -> Tensors:
        """Tensors by name; `waiting` ends at the present. The sums for `recent` are left out, as in `Episodes`."""
        return {
            "owners": self._owners,
            "ages": self._clock - self._began,
            "owned": self._owned,
            "returns": self._return,
            "longest": self._longest,
            "ended": self._ended,
            "waiting": self._waiting[:, :, : self._clock - self._oldest],
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict`, of checked shapes and dtypes."""
        waiting = state["waiting"]
        self.restart()
        self._oldest, self._owners = -waiting.shape[2], state["owners"].cpu().clone()
        owned, returns, longest, ended = (state[name] for name in ("owned", "returns", "longest", "ended"))
        self._began.copy_(-state["ages"])
        self._owned.copy_(owned)
        self._return.copy_(returns)
        self._longest.copy_(longest)
        self._ended.copy_(ended)
        self._waiting = torch.zeros(
            3, self._shape[0], max(AT_FIRST, 2 * waiting.shape[2]), dtype=torch.float64, device=self._device
        )
        self._waiting[:, :, : waiting.shape[2]] = waiting
