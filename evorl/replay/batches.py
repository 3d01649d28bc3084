"""The batches of updates, from drawn indices of a replay buffer.

Axes: U updates, P agents, D draws, B transitions of a batch, n steps of a return, T learned steps of a sequence, K
steps of its burn-in. A `BatchBuilder` makes one transition of each draw, so B = D; a `SequenceBuilder` makes T,
time-major, so B = T * D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evorl.replay.samplers import Draws
from evorl.replay.storage import Storage, Transitions
from evorl.types.agents import Agent
from evorl.types.batches import Batch, RecurrentInput
from evorl.types.outcomes import UserError

Returns = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The algorithm's n-step return. Takes rewards [..., P, B, n], window lengths in steps [..., P, B] and discounts [P];
gives the return of those steps and the bootstrap discount of the state after them, both [..., P, B]."""
MAX_SHARE = 0.9
"""The share of the largest error in the priority of a sequence; the rest is the mean's (R2D2, section 2.3)."""


class BatchBuilder:
    """Batches of transitions of up to `n` steps, for n-step returns (arXiv 1710.02298); with n = 1 as they are stored.

    A window is cut at the end of its episode, at a discontinuity of its lane, and at the newest row.
    Its first step can be drawn immediately: shorter windows give correct returns too, and all steps stay equally
    likely. `reward` is the n-step return; `terminated` and the next observation are those of the last step, also where
    that was truncated. The column `discount` is the bootstrap factor: gamma^k after k steps.
    """

    transitions = 1
    """Maximum number of transitions per draw."""
    burn_in = 0
    """Maximum number of observations before them per draw."""

    def __init__(self, storage: Storage, n: int = 1, returns: Returns | None = None) -> None:
        """`returns` computes n-step returns. Raises UserError if the storage has fewer rows than `n`."""
        if n > storage.rows:
            raise UserError(
                f"replay.n_step: windows of {n} steps are longer than the {storage.rows} steps of each environment "
                f"that replay.capacity keeps on a process; use replay.n_step={storage.rows} at most, or a larger "
                "capacity"
            )
        self.storage = storage
        self._n = n
        self._returns = returns
        self._gamma: Tensor

    def begin(self, agents: Sequence[Agent]) -> None:
        """Start a generation with these agents, whose discounts gamma the returns use."""
        if self._n > 1:
            gamma = [agent.hyperparameters["gamma"] for agent in agents]
            self._gamma = torch.tensor(gamma, device=self.storage.device)

    def batches(self, draws: Draws, due: Tensor) -> list[Batch]:
        """The batches of draws [U, P, D], for the agents that are `due` [U, P]."""
        batch = Batch(*self.gather(draws.indices), draws.weight, due, share=draws.share)
        return batch.unbound([False] * len(due))

    def gather(self, index: Tensor) -> Transitions:
        """The transitions [U, P, B] that begin at `index` [U, P, B]."""
        storage, n = self.storage, self._n
        if n == 1 or self._returns is None:
            return storage.gather(index)
        steps = storage.window_end(index, n)
        last = storage.following(index, steps - 1)
        unchanged = [name for name in storage.columns if name not in ("reward", "terminated")]
        columns = storage.gather_columns(index, unchanged) | storage.gather_columns(last, ["terminated"])
        window = storage.following(index.unsqueeze(-1), torch.arange(n, device=storage.device))
        rewards = storage.gather_columns(window, ["reward"])["reward"]
        columns["reward"], columns["discount"] = self._returns(rewards, steps, self._gamma)
        return Transitions(storage.observation(index), storage.next_observation(last), columns)

    def errors(self, errors: Tensor, batch: Batch) -> Tensor:
        """The error [P, D] of each draw, which sets its priority, from those of its transitions [P, B]."""
        return errors


class SequenceBuilder(BatchBuilder):
    """Batches of runs of up to `length` steps of one lane, for recurrent networks (R2D2, Kapturowski et al. 2019).

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

    def batches(self, draws: Draws, due: Tensor) -> list[Batch]:
        storage, index, split = self.storage, draws.indices, self.burn_in
        steps = storage.window_end(index, self.transitions).unsqueeze(-2)
        before = storage.window_start(index, split).unsqueeze(-2)
        # [U, P, K + T, D]; times outside repeat the first or last step of the run.
        run = storage.following(index.unsqueeze(-2), self._time.clamp(min=-before, max=steps - 1))
        after = self._time[split:] >= steps
        observation, next_observation = {}, {}
        final = storage.next_observation(run[..., -1, :])
        for name, rows in storage.observation(run[..., split:, :]).items():
            last = final[name].unsqueeze(2)
            # The observation after the last step follows it directly: row t + 1 is the next observation of row t.
            rows = torch.where(after.view(*after.shape, *[1] * (rows.dim() - after.dim())), last, rows)
            rows = torch.cat((rows, last), 2).flatten(2, 3)
            observation[name], next_observation[name] = rows[:, :, : -index.shape[-1]], rows[:, :, index.shape[-1] :]
        columns = storage.gather_columns(run[..., split:, :], storage.columns)
        share = draws.weight if draws.share is None else draws.share
        # [U, P, 1]; an agent without a draw has share 0 in all of them.
        mean = (share * steps.squeeze(-2)).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
        step_weight = ~after / mean.nan_to_num(1.0).unsqueeze(-2)
        burn_in = storage.observation(run[..., :split, :]) if split else {}
        recurrent = RecurrentInput(
            draws.weight.new_zeros(*index.shape, 0, 0),
            self._time == -before,
            {name: value.flatten(2, 3) for name, value in burn_in.items()},
        )
        batch = Batch(
            observation,
            next_observation,
            {name: value.flatten(2, 3) for name, value in columns.items()},
            (draws.weight.unsqueeze(-2) * step_weight).flatten(2, 3),
            due,
            recurrent,
            share=None if draws.share is None else (share.unsqueeze(-2) * step_weight).flatten(2, 3),
        )
        return batch.unbound([False] * len(due))

    def errors(self, errors: Tensor, batch: Batch) -> Tensor:
        """A mixture of the largest and the mean absolute error of the learned steps."""
        learned = (batch.weight > 0).unflatten(-1, (self.transitions, -1))
        sizes = errors.abs().unflatten(-1, (self.transitions, -1)) * learned
        mean = sizes.sum(1) / learned.sum(1).clamp(min=1)
        mixed: Tensor = MAX_SHARE * sizes.amax(1) + (1 - MAX_SHARE) * mean
        return mixed
