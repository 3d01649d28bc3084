"""Prioritised replay over all ranks (arXiv 1511.05952). Axes: U updates, P agents, B batch, R ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.priorities import Floats, Integers
from evorl.replay.protocols import Agreement, Draws
from evorl.replay.sampler import SamplerSettings, share_of_draws
from evorl.replay.slot_priorities import SlotPriorities
from evorl.replay.storage import Storage
from evorl.replay.stored import WHERE
from evorl.seeding import numpy_generator, numpy_state, set_numpy_state
from evorl.system.formats import load_like
from evorl.types import Agent, RunFailed, Tensors, UpdateResult, UserError


@dataclass(frozen=True)
class PrioritySettings:
    """Priorities are (|td_error| + `epsilon`)^`exponent`; with exponent 0 all are equal and no error is needed.

    The importance-sampling exponent is annealed linearly from `importance_start` to `importance_end` over
    `importance_steps` environment steps of an agent; a generation has `generation_steps`. Unless the replay is
    `shared`, an agent draws only its own or an ancestor's transitions.
    """

    exponent: float
    epsilon: float
    importance_start: float
    importance_end: float
    generation_steps: int
    importance_steps: int
    shared: bool

    def importance(self, generation: int, steps: Floats) -> Floats:
        """Return the importance-sampling exponent [P] after `steps` [P] of a generation, numbered from 1."""
        done = ((generation - 1) * self.generation_steps + steps) / self.importance_steps
        return self.importance_start + np.clip(done, 0, 1) * (self.importance_end - self.importance_start)


@dataclass
class Draw:
    """One draw: `slots` [P, U, B], the mask `counted`, and the `newest` and `oldest` row at the time.

    It buffers the errors [U, P, B] of the `observed` updates and which agents were `active` [U, P].
    """

    slots: Integers
    counted: NDArray[np.bool_]
    newest: int
    oldest: int
    errors: Tensor
    active: Tensor
    observed: list[int] = field(default_factory=list)


class PrioritisedSampler:
    """Each agent draws in proportion to its own priorities, as if all ranks held one buffer.

    One exchange per vector step shares the total, minimum and maximum priority of every rank. All draws of that step
    are then made at once: systematic sampling gives each rank a share that follows its total, and the rank draws that
    share from its own part by stratified sampling. The priorities from the updates are set before the next exchange.
    The paper's weight (N p_i / sum p)^-beta, divided by its largest value over the union, is (min p / p_i)^beta: N and
    the sum cancel.
    """

    def __init__(self, storage: Storage, agents: int, settings: PrioritySettings, place: SamplerSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._place = place
        self._priorities = SlotPriorities(storage, agents, settings.shared)
        self._drawn: Draw | None = None
        self._agents: Sequence[Agent] = ()
        self._ranks, self._generation = 1, 1
        self._draws: Integers
        self._mass: Floats
        self._minimum: Floats
        self._beta: Floats
        self._shared: np.random.Generator
        self._own: np.random.Generator

    def begin(self, agents: Sequence[Agent], generation: int, ranks: int) -> None:
        """Start a generation with these agents, held by `ranks` ranks; children inherit their parents' priorities."""
        self._set_priorities()
        self._priorities.begin([(agent.id, agent.parent) for agent in agents])
        self._drawn = None
        self._agents, self._generation, self._ranks = agents, generation, ranks
        self._draws = self._place.draws(agents, ranks)
        self._shared = self._place.shared(generation)
        self._own = numpy_generator(self._place.seed, generation=generation, rank=self._place.rank, purpose="draws")

    def insert(self, errors: Floats) -> None:
        """Set the first priorities of the T newest rows from errors [T, N], equal for all agents.

        Raises RunFailed if an error is not finite.
        """
        self._set_priorities()
        self._priorities.drop()
        if not np.isfinite(errors).all():
            raise RunFailed("replay.prioritised: errors of an actor are not finite and make no priorities")
        self._priorities.insert((np.abs(errors) + self._settings.epsilon) ** self._settings.exponent)

    def report(self) -> Floats:
        """Return the total, minimum and maximum priority [P], and the number of transitions [P] without one."""
        self._set_priorities()
        priorities = self._priorities
        priorities.drop()
        # With exponent 0 all priorities are equal, so the minimum is the maximum and no search is needed.
        minimum = priorities.tree.minimum if self._settings.exponent else priorities.maximum
        return np.concatenate([priorities.tree.total, minimum, priorities.maximum, priorities.fresh()])

    def agree(self, known: Agreement) -> None:
        """Give new transitions the largest priority over all ranks; record all ranks' totals and minima after that."""
        mass, minimum, maximum, fresh = known.reports.reshape(len(known.reports), 4, -1).swapaxes(0, 1)
        largest = maximum.max(0)
        self._priorities.maximum = largest
        self._priorities.insert()
        self._mass = mass + fresh * largest
        self._minimum = np.minimum(minimum, largest).min(0)
        self._beta = self._settings.importance(self._generation, known.steps)

    def draw(self, updates: int) -> Draws:
        """Draw slots for `updates` updates, with importance weights."""
        offset = self._shared.random((updates, len(self._agents)))
        counts = share_of_draws(self._draws, self._mass, self._place.part, offset).T[..., None]
        # A rank without a draw still takes part, with a weight of zero.
        place = np.arange(max(1, int(counts.max())))
        shape = (len(self._agents), updates, len(place))
        fraction = (place + self._own.random(shape)) / np.maximum(counts, place + 1)
        found = self._priorities.tree.find(fraction.reshape(shape[0], -1))
        slots, priority = found[0].reshape(shape), found[1].reshape(shape)
        counted = place < counts
        if not counted.all():
            # An agent with nothing to draw here gets arbitrary slots of weight zero.
            slots, priority = np.where(priority > 0, slots, 0), np.where(counted, priority, 1.0)
        share = counted * (self._ranks / self._draws)[:, None, None]
        weight = share * (self._minimum[:, None, None] / priority) ** self._beta[:, None, None]
        device, newest = self._storage.device, self._storage.written - 1
        errors = torch.zeros(updates, shape[0], shape[2], device=device)
        active = torch.zeros(updates, shape[0], device=device)
        self._drawn = Draw(slots, counted, newest, self._priorities.oldest, errors, active)
        each = [_by_update(values.astype(np.float32), device) for values in (weight, share)]
        return Draws(_by_update(slots, device), *each)

    def observe(self, update: int, result: UpdateResult) -> None:
        """Buffer the errors of an update of the last draw; they become priorities before the next draw.

        Raises UserError if the algorithm returns no errors.
        """
        drawn = self._drawn
        if drawn is None or not self._settings.exponent:
            return
        if result.errors is None:
            raise UserError("replay.prioritised: this algorithm gives no errors to draw by; leave it out")
        drawn.errors[update] = result.errors
        drawn.active[update] = 1.0 if result.active is None else result.active
        drawn.observed.append(update)

    def generators(self) -> Tensors:
        """Return the states of the random generators, as bytes by name."""
        return {"shared": numpy_state(self._shared), "own": numpy_state(self._own)}

    def resume(self, generators: Tensors) -> None:
        """Load the output of `generators`. Raises UserError for an invalid one."""
        own = self.generators()
        load_like(generators, own, WHERE)
        set_numpy_state(self._shared, own["shared"])
        set_numpy_state(self._own, own["own"])

    def state(self) -> Tensors:
        """Return the priorities for a checkpoint, in the format of `SlotPriorities.state`."""
        self._set_priorities()
        return self._priorities.state()

    def restore(self, tensors: Tensors, numbers: Mapping[str, int]) -> None:
        """Restore from `state`, for a storage with these `numbers`. Raises UserError for an invalid state."""
        self._priorities.restore(tensors, numbers)

    def _set_priorities(self) -> None:
        """Turn the buffered errors into priorities. Raises RunFailed if an error is not finite."""
        drawn = self._drawn
        if drawn is None or not drawn.observed:
            return
        updates, drawn.observed = drawn.observed, []
        chosen = slice(None) if updates == list(range(len(drawn.errors))) else updates
        errors = drawn.errors[chosen].abs().double().cpu().numpy().swapaxes(0, 1)
        active = drawn.active[chosen].cpu().numpy().T > 0
        where = drawn.counted[:, chosen]
        where = where if active.all() else where & active[..., None]
        if not np.isfinite(errors).all():
            self._refuse((~np.isfinite(errors) & where).any((1, 2)))
            errors = np.where(where, errors, 0.0)
        priority = (errors + self._settings.epsilon) ** self._settings.exponent
        slots, flat = drawn.slots[:, chosen], (len(self._agents), -1)
        if self._priorities.oldest > drawn.oldest:
            where = where & self._priorities.stands(slots, drawn.newest)
        self._priorities.set(slots.reshape(flat), priority.reshape(flat), where.reshape(flat))

    def _refuse(self, lost: NDArray[np.bool_]) -> None:
        """Raise RunFailed naming the agents whose errors are not finite (`lost` [P])."""
        if lost.any():
            names = ", ".join(str(agent.id) for agent, one in zip(self._agents, lost, strict=True) if one)
            raise RunFailed(f"replay.prioritised: errors of agent {names} are not finite and make no priorities")


def _by_update(values: NDArray[np.int64] | NDArray[np.float32], device: torch.device) -> Tensor:
    """Convert values [P, U, B] to a tensor [U, P, B]."""
    return torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1))).to(device)
