"""The transitions or sequences of a batch, from drawn slots of a replay buffer.

Axes: U updates, P agents, D draws, B transitions of a batch, n steps of a return, T learned steps of a sequence, K
steps of its burn-in. `OneStep` and `NStep` make one transition of each draw, so B = D; `Sequences` makes T, time-major,
so B = T * D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evorl.replay.samplers import Draws
from evorl.replay.storage import Found, Storage
from evorl.types import Agent, Batch, RecurrentInput, Tensors, UserError

Returns = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The algorithm's n-step return. Takes rewards [..., P, B, n], window lengths in steps [..., P, B] and discounts [P];
gives the return of those steps and the bootstrap discount of the state after them, both [..., P, B]."""
MAX_SHARE = 0.9
"""The share of the largest error in the priority of a sequence; the rest is the mean's (R2D2, section 2.3)."""


class Gathered(NamedTuple):
    """The batches of U updates: parts and columns [U, P, B, ...], `weight` and `share` [U, P, B] as in `Batch`.

    Sequences also have `started` [U, P, K + T, D] and the observations of the `burn_in` [U, P, K * D, ...].
    """

    observation: Tensors
    next_observation: Tensors
    columns: Tensors
    weight: Tensor
    share: Tensor | None
    started: Tensor | None = None
    burn_in: Tensors | None = None

    def batch(self, update: int, number: int, due: Tensor, *, all_due: bool) -> Batch:
        """The batch of one update, number `number` of all drawn with it, for the agents that are `due` [P]."""

        def of(values: Tensors) -> Tensors:
            return {name: value[update] for name, value in values.items()}

        recurrent = None
        if self.started is not None and self.burn_in is not None:
            started = self.started[update]
            state = self.weight.new_zeros(len(started), started.shape[-1], 0, 0)
            recurrent = RecurrentInput(state, started, of(self.burn_in))
        share = None if self.share is None else self.share[update]
        fields = of(self.observation), of(self.next_observation), of(self.columns)
        return Batch(*fields, self.weight[update], due, recurrent, all_due=all_due, number=number, share=share)


class Windows:
    """The base class that gathers batches from drawn slots."""

    transitions = 1
    """Maximum number of transitions per draw."""
    burn_in = 0
    """Maximum number of observations before them per draw."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def begin(self, agents: Sequence[Agent]) -> None:
        """Start a generation with these agents."""

    def batches(self, draws: Draws) -> Gathered:
        """The batches of draws [U, P, D]: one transition of each, unless a subclass makes more of them."""
        return Gathered(*self.gather(draws.slots), draws.weight, draws.share)

    def gather(self, slots: Tensor) -> Found:
        """The transitions [U, P, B] of draws at `slots` [U, P, B]."""
        raise NotImplementedError

    def errors(self, errors: Tensor, batch: Batch) -> Tensor:
        """The error [P, D] of each draw, which sets its priority, from those of its transitions [P, B]."""
        return errors


class OneStep(Windows):
    """One-step transitions as stored; each loss applies its own discount."""

    def gather(self, slots: Tensor) -> Found:
        return self.storage.gather(slots)


class NStep(Windows):
    """Windows of up to `n` steps of one stream as single transitions, for n-step returns (arXiv 1710.02298).

    A window is cut at the end of its episode, at a discontinuity or a dropped step of its stream, and at the newest
    row. Its first slot can be drawn immediately: shorter windows give correct returns too, and all slots stay equally
    likely. `reward` is the n-step return; `terminated` and the next observation are those of the last step, also where
    that was truncated. The column `discount` is the bootstrap factor: gamma^k after k steps.
    """

    def __init__(self, storage: Storage, n: int, returns: Returns) -> None:
        """Raises UserError if the storage has fewer rows than `n`."""
        super().__init__(storage)
        if n > storage.rows:
            raise UserError(
                f"replay.n_step: windows of {n} steps are longer than the {storage.rows} steps of each environment "
                f"that replay.capacity keeps on a process; use replay.n_step={storage.rows} at most, or a larger "
                "capacity"
            )
        self._n = n
        self._returns = returns
        self._steps = torch.arange(n, device=storage.device)
        self._gamma: Tensor

    def begin(self, agents: Sequence[Agent]) -> None:
        """Read each agent's discount gamma."""
        gamma = [agent.hyperparameters["gamma"] for agent in agents]
        self._gamma = torch.tensor(gamma, device=self.storage.device)

    def gather(self, slots: Tensor) -> Found:
        """N-step transitions [U, P, B] that begin at `slots` [U, P, B]."""
        storage = self.storage
        steps = storage.window_end(slots, self._n)
        last = storage.following(slots, steps - 1)
        unchanged = [name for name in storage.columns if name not in ("reward", "terminated")]
        columns = storage.gather_columns(slots, unchanged) | storage.gather_columns(last, ["terminated"])
        along = storage.following(slots.unsqueeze(-1), self._steps)
        rewards = storage.gather_columns(along, ["reward"])["reward"]
        columns["reward"], columns["discount"] = self._returns(rewards, steps, self._gamma)
        return Found(storage.observation(slots), storage.next_observation(last), columns)


class Sequences(Windows):
    """Runs of up to `length` steps of one stream, for recurrent networks (R2D2, Kapturowski et al. 2019).

    A draw is the first learned step. A sequence ends where an n-step window does; later steps have weight 0, and
    each learned step of a rank's batch counts the same. The recurrent state at the first learned step is computed anew
    from up to `burn_in` steps of the episode before it, by the parameters of the update, beginning with zeros. States
    are not stored: agents of one replay have networks of their own, whose states mean nothing to each other.
    """

    def __init__(self, storage: Storage, length: int, burn_in: int) -> None:
        """Raises UserError if the storage has fewer rows than such a sequence."""
        super().__init__(storage)
        if length + burn_in > storage.rows:
            raise UserError(
                f"algorithm.sequence_length: sequences of {length} steps after a burn-in of {burn_in} are longer than "
                f"the {storage.rows} steps of each environment that replay.capacity keeps on a process; make them "
                "shorter, or the capacity larger"
            )
        self.transitions, self.burn_in = length, burn_in
        # [K + T, 1]; the first learned step is at time 0.
        self._time = torch.arange(-burn_in, length, device=storage.device).unsqueeze(-1)

    def batches(self, draws: Draws) -> Gathered:
        storage, slots, split = self.storage, draws.slots, self.burn_in
        steps = storage.window_end(slots, self.transitions).unsqueeze(-2)
        before = storage.window_start(slots, split).unsqueeze(-2)
        # [U, P, K + T, D]; times outside repeat the first or last step of the run.
        along = storage.following(slots.unsqueeze(-2), self._time.clamp(min=-before, max=steps - 1))
        after = self._time[split:] >= steps
        observation, next_observation = {}, {}
        end = storage.next_observation(along[..., -1, :])
        for name, seen in storage.observation(along[..., split:, :]).items():
            last = end[name].unsqueeze(2)
            # The observation after the last step follows it directly: row t + 1 is the next observation of row t.
            seen = torch.where(after.view(*after.shape, *[1] * (seen.dim() - after.dim())), last, seen)
            rows = torch.cat((seen, last), 2).flatten(2, 3)
            observation[name], next_observation[name] = rows[:, :, : -slots.shape[-1]], rows[:, :, slots.shape[-1] :]
        columns = storage.gather_columns(along[..., split:, :], storage.columns)
        share = draws.weight if draws.share is None else draws.share
        # [U, P, 1]; an agent without a draw has share 0 in all of them.
        mean = (share * steps.squeeze(-2)).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
        counted = ~after / mean.nan_to_num(1.0).unsqueeze(-2)
        burn_in = storage.observation(along[..., :split, :]) if split else {}
        return Gathered(
            observation,
            next_observation,
            {name: _steps(value) for name, value in columns.items()},
            _steps(draws.weight.unsqueeze(-2) * counted),
            None if draws.share is None else _steps(share.unsqueeze(-2) * counted),
            self._time == -before,
            {name: _steps(value) for name, value in burn_in.items()},
        )

    def errors(self, errors: Tensor, batch: Batch) -> Tensor:
        """A mixture of the largest and the mean absolute error of the learned steps."""
        learned = (batch.weight > 0).unflatten(-1, (self.transitions, -1))
        sizes = errors.abs().unflatten(-1, (self.transitions, -1)) * learned
        mean = sizes.sum(1) / learned.sum(1).clamp(min=1)
        mixed: Tensor = MAX_SHARE * sizes.amax(1) + (1 - MAX_SHARE) * mean
        return mixed


def _steps(values: Tensor) -> Tensor:
    """Flatten values [U, P, T, D, ...] to [U, P, T * D, ...]."""
    return values.flatten(2, 3)


def make_windows(storage: Storage, n: int, returns: Returns) -> OneStep | NStep:
    """N-step windows, or one-step transitions for n = 1; `returns` computes the algorithm's n-step returns."""
    return OneStep(storage) if n == 1 else NStep(storage, n, returns)
