"""Data of a generation: steps, batches, losses and their results. Axes: P agents, E environments, B batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.types.tensors import Observation, Tensors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Transition:
    """One step of every environment; all tensors lead with [P, E].

    `started` marks where `observation` begins an episode. `next_observation` is the result of the action, also at the
    end of an episode. `terminated` means do not bootstrap; `truncated` means that the episode was cut off: bootstrap.
    Where `valid` is false the environment was only reset and there is no transition; `all_valid` says that there is no
    such step, `any_truncated` that some episode was truncated. `started` and `valid` are on the CPU whatever the
    device, because control flow depends on them.
    """

    observation: Observation
    started: Tensor
    reward: Tensor
    next_observation: Observation
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    all_valid: bool = True
    any_truncated: bool = False


@dataclass
class PolicyOutput:
    """A policy's output in each environment: `action` [P, E, ...] for the environment, and `extras` [P, E, ...].

    Extras are other quantities the algorithm learns from, such as the log-probability. `state` and `next_state` [P, E,
    K, N] are the recurrent state before and after the step; they are empty if no network is recurrent.
    """

    action: Tensor
    extras: Tensors
    state: Tensor
    next_state: Tensor


@dataclass
class RecurrentInput:
    """Inputs of recurrent networks other than observations.

    Axes: T time, S sequences, I burn-in steps, K numbers for each of N units. `state` [P, S, K, N] is the recurrent
    state before the first step; `started` [P, T, S] marks the starts of episodes. Sequences from a replay have no
    state; they have the observations of the `burn_in` [P, I * S, ...] before them, and their `started` is
    [P, I + T, S].
    """

    state: Tensor
    started: Tensor
    burn_in: Observation = field(default_factory=dict)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> RecurrentInput:
        """This input with `function` applied to each tensor."""
        return RecurrentInput(function(self.state), function(self.started), _mapped(self.burn_in, function))

    def part(self, members: slice | Tensor | int, units: int) -> RecurrentInput:
        """Select some of the agents, with `units` recurrent units."""
        part = self.mapped(lambda value: value[members])
        part.state = part.state[..., :units]
        return part


@dataclass
class Batch:
    """The input of one population update; all tensors lead with [P, B].

    The loss is the sum over B of `weight` times the loss per sample: the mean over each agent's own batch whatever its
    size. Under prioritised replay `weight` includes importance-sampling weights and `share` [P, B] does not; metrics
    are means by `share`, or by `weight` if there is no `share`. Agents with `due` [P] 0 skip this update; `all_due`
    says that none does. `columns` are actions, rewards, and anything else stored or computed per transition.
    Sequences for recurrent agents are time-major in B = T * S, with their `recurrent` input. A batch may instead carry
    flat `gradients` by network, computed by actors, with their metrics [P, 1] as columns; where the actors have also
    `applied` them, an update only counts and checks them.
    `number` is the batch's index among those that were drawn together.
    """

    observation: Observation
    next_observation: Observation
    columns: Tensors
    weight: Tensor
    due: Tensor
    recurrent: RecurrentInput | None = None
    all_due: bool = False
    gradients: Tensors = field(default_factory=dict)
    number: int = 0
    share: Tensor | None = None
    applied: bool = False

    def unbound(self, all_due: Sequence[bool]) -> list[Batch]:
        """The batches of U updates, from one whose tensors lead with [U, P, B]; they are views."""
        count, recurrent = len(all_due), self.recurrent
        named = [_unbound(tensors, count) for tensors in (self.observation, self.next_observation, self.columns)]
        memories = [recurrent and recurrent.part(update, recurrent.state.shape[-1]) for update in range(count)]
        shares = [None] * count if self.share is None else self.share.unbind()
        rows = zip(*named, self.weight.unbind(), self.due.unbind(), memories, all_due, shares, strict=True)
        return [
            Batch(observed, following, columns, weight, due, memory, of_all, share=share)
            for observed, following, columns, weight, due, memory, of_all, share in rows
        ]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """This batch with `function` applied to each tensor, but for `gradients`."""
        return replace(
            self,
            observation=_mapped(self.observation, function),
            next_observation=_mapped(self.next_observation, function),
            columns=_mapped(self.columns, function),
            weight=function(self.weight),
            due=function(self.due),
            recurrent=self.recurrent and self.recurrent.mapped(function),
            share=None if self.share is None else function(self.share),
        )

    def part(self, members: slice | Tensor | int, units: int = 0) -> Batch:
        """Select some of the agents, with `units` recurrent units."""
        part = self.mapped(lambda value: value[members])
        if part.recurrent is not None:
            part.recurrent.state = part.recurrent.state[..., :units]
        return part


def _mapped(tensors: Observation, function: Callable[[Tensor], Tensor]) -> Tensors:
    return {name: function(value) for name, value in tensors.items()}


def _unbound(tensors: Observation, count: int) -> list[Tensors]:
    """Views of each of the first axis' `count` indices."""
    rows = zip(*(values.unbind() for values in tensors.values()), strict=True)
    return [dict(zip(tensors, row, strict=True)) for row in rows] if tensors else [{}] * count


@dataclass
class Loss:
    """The loss of a stack of agents: `per_sample` [P, B], whose weighted sum over B is each agent's loss.

    `metrics` returns metrics [P, B], in updates that report them, to be averaged over the batch; `errors` [P, B]
    (td_error) set priorities. Later objectives of the update find `columns` [P, B] in their batch.
    """

    per_sample: Tensor
    metrics: Callable[[], Tensors] = dict
    errors: Tensor | None = None
    columns: Tensors = field(default_factory=dict)


@dataclass
class UpdateResult:
    """The result of an update: which agents were updated (`active` [P], 1 or 0), and their errors [P, B] if any.

    `active` None means all of them.
    """

    active: Tensor | None = None
    errors: Tensor | None = None


@dataclass
class UpdateMetrics:
    """Metrics summed over updates: the number of updates [P], and per name the sum and the `counts` [P] it is over."""

    updates: NDArray[np.float64]
    sums: dict[str, NDArray[np.float64]]
    counts: dict[str, NDArray[np.float64]]


class Segment(NamedTuple):
    """A rollout in time order, from which targets are computed; all [T, P, E].

    `value` is V(s) of the observation. `next_value` is that of the next observation, defined in the last row and where
    an episode is truncated. Where `valid` is false there is no transition.
    """

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
