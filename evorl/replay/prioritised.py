"""Prioritised replay over all ranks (arXiv 1511.05952): sum trees, and the sampler that keeps each step's priorities.

Axes: U updates, P agents, B batch, R ranks; N leaves of a tree or lanes, S steps of an island in some rows, K steps at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.config.learning import ImportanceExponent, Prioritised
from evorl.replay.samplers import PRIORITIES, Draws, Sampler, share_of_draws
from evorl.replay.storage import WHERE, Storage, rows_held
from evorl.seeding import numpy_generator
from evorl.system.formats import check_tensors
from evorl.types.agents import Agent
from evorl.types.batches import UpdateResult
from evorl.types.outcomes import RunFailed, UserError
from evorl.types.tensors import Tensors

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class PriorityTree:
    """One sum tree per agent (arXiv 1511.05952, appendix B), vectorised over agents.

    Each level is one array [P, nodes] with twice as many nodes as the next, so that node i of the flattened array has
    the children 2 i and 2 i + 1 in the level below, for any agent. Sums are recomputed, never incremented, so rounding
    errors do not accumulate. A leaf of 0 is never drawn.
    """

    def __init__(self, agents: int, leaves: int) -> None:
        depth = max(1, (leaves - 1).bit_length())
        self.levels = [np.zeros((agents, 1 << level)) for level in range(depth, -1, -1)]
        """The leaf priorities, then each level of sums up to the root."""
        self._first = np.arange(agents)[:, None] << depth
        self._minimum = np.full(agents, np.inf)
        self._lost = np.zeros(agents, dtype=np.bool_)

    @staticmethod
    def memory(agents: int, leaves: int) -> int:
        """Size of the trees in bytes."""
        return agents * 16 << max(1, (leaves - 1).bit_length())

    @property
    def leaves(self) -> Floats:
        """The priorities [P, N], zero-padded to a power of two."""
        return self.levels[0]

    @property
    def total(self) -> Floats:
        """The sum [P] of each agent's priorities."""
        return self.levels[-1][:, 0]

    @property
    def minimum(self) -> Floats:
        """The smallest positive priority [P]; infinite if there is none.

        It is searched for only after the smallest was overwritten or forgotten, which is rare because it is seldom
        drawn: a second tree would double the time of every change.
        """
        if self._lost.any():
            leaves = self.leaves[self._lost]
            self._minimum[self._lost] = np.min(leaves, 1, where=leaves > 0, initial=np.inf)
            self._lost[:] = False
        return self._minimum

    def set(self, leaf: Integers, priority: Floats, where: NDArray[np.bool_]) -> None:
        """Set leaves [P, K] to positive priorities [P, K] `where` [P, K]; the last of duplicate leaves counts."""
        places = leaf + self._first
        flat, node, values = self.leaves.reshape(-1), places.reshape(-1), priority.reshape(-1)
        if not where.all():
            node, values = places[where], priority[where]
        replaced = ((flat.take(places) == self._minimum[:, None]) & where).any(1)
        flat[node] = values
        self._note(np.min(flat.take(places), 1, where=where, initial=np.inf), replaced)
        for below, here in zip(self.levels, self.levels[1:], strict=False):
            if here.size <= len(node):
                np.add(below[:, ::2], below[:, 1::2], out=here)
                continue
            node = node >> 1
            pairs = below.reshape(-1, 2).take(node, 0)
            here.reshape(-1)[node] = pairs[:, 0] + pairs[:, 1]

    def fill(self, start: int, stop: int, priority: Floats | float) -> None:
        """Set leaves `start` to `stop` of all agents to priorities [P, stop - start]; 0 removes a leaf."""
        leaves = self.leaves[:, start:stop]
        replaced = (leaves == self._minimum[:, None]).any(1)
        leaves[:] = priority
        self._note(np.min(leaves, 1, where=leaves > 0, initial=np.inf), replaced)
        for below, here in zip(self.levels, self.levels[1:], strict=False):
            start, stop = start // 2, (stop + 1) // 2
            children = below[:, 2 * start : 2 * stop]
            np.add(children[:, ::2], children[:, 1::2], out=here[:, start:stop])

    def find(self, fraction: Floats) -> tuple[Integers, Floats]:
        """Find the leaves [P, K] at `fraction` [P, K] in [0, 1) of each agent's total; also return their priorities."""
        rest = fraction * self.total[:, None]
        node = np.empty(fraction.shape, dtype=np.int64)
        node[:] = np.arange(len(fraction))[:, None]
        for level in self.levels[-2::-1]:
            node <<= 1
            left = level.reshape(-1).take(node)
            right = rest >= left
            left *= right
            rest -= left
            node += right
        priority = self.leaves.reshape(-1).take(node)
        node -= self._first
        # Rounding may overshoot by one leaf, onto a leaf of priority 0.
        for agent, at in zip(*np.nonzero((priority == 0) & (self.total > 0)[:, None]), strict=True):
            node[agent, at] = np.flatnonzero(self.leaves[agent, : node[agent, at]])[-1]
            priority[agent, at] = self.leaves[agent, node[agent, at]]
        return node, priority

    def take_over(self, sources: Integers) -> None:
        """Reassign priorities: each agent copies the tree at place `sources` [P], or starts empty where that is -1."""
        self._minimum = np.where(sources < 0, np.inf, self.minimum[sources])
        self._lost = np.zeros(len(sources), dtype=np.bool_)
        self._first = np.arange(len(sources))[:, None] << (len(self.levels) - 1)
        for level, values in enumerate(self.levels):
            self.levels[level] = values[sources]
            self.levels[level][sources < 0] = 0.0

    def _note(self, smallest: Floats, replaced: NDArray[np.bool_]) -> None:
        """Update the minimum from the smallest new priority [P]; `replaced` marks agents that lost their minimum."""
        self._lost = (self._lost | replaced) & (smallest > self._minimum)
        self._minimum = np.minimum(self._minimum, smallest)


@dataclass
class PendingErrors:
    """One draw, `index` [P, U, B], of which the `in_share` count, with the `newest` and `oldest` row at the time.

    `errors` [U, P, B] are the td_errors of the `observed` updates, in which the `active` [U, P] agents took part.
    """

    index: Integers
    in_share: NDArray[np.bool_]
    newest: int
    oldest: int
    errors: Tensor
    active: Tensor
    observed: list[int] = field(default_factory=list)


EPSILON = 1e-6
"""Added to each error, so that all transitions can be drawn."""
FIRST_PRIORITY = 1.0
"""The initial maximum priority, below which the maximum never falls (algorithm 1 of the paper)."""


class PrioritisedSampler(Sampler):
    """Each agent draws in proportion to its own priorities, as if all ranks held one buffer.

    Every agent has a priority for each step that it may draw; all others have 0. A new transition gets the largest
    priority that its agent has set so far. Rows gain and lose priorities at an exchange, not when the storage changes,
    so that earlier draws can still be updated.

    One exchange per vector step shares the total, minimum and maximum priority of every rank. All draws of that step
    are then made at once: systematic sampling gives each rank a share that follows its total, and the rank draws that
    share from its own part by stratified sampling. The priorities from the updates are set before the next exchange.
    The paper's weight (N p_i / sum p)^-beta, divided by its largest value over the union, is (min p / p_i)^beta: N and
    the sum cancel.
    """

    def __init__(
        self,
        storage: Storage,
        agents: int,
        prioritised: Prioritised | None,
        *,
        shared: bool,
        generation_steps: int,
        max_steps: int,
        **place: Any,
    ) -> None:
        """Priorities are (|td_error| + EPSILON)^exponent; without `prioritised` all are equal and need no error.

        The importance-sampling exponent is annealed linearly over `max_steps` environment steps of an agent; a
        generation has `generation_steps`. Unless the replay is `shared`, an agent draws only its own or an
        ancestor's transitions; a child whose parent is not on this rank draws all transitions that were collected at
        its index in the population. `place` are the arguments of `Sampler`.
        """
        super().__init__(storage, **place)
        if prioritised is None:
            prioritised = Prioritised(exponent=0, importance_exponent=ImportanceExponent(start=0, end=0))
        self._exponent, self._importance = prioritised.exponent, prioritised.importance_exponent
        self._generation_steps, self._max_steps = generation_steps, max_steps
        self.tree = PriorityTree(agents, storage.size // storage.islands)
        """A leaf is the number of a step within the agent's island."""
        self.maximum = np.full(agents, FIRST_PRIORITY)
        """The largest priority [P] ever set."""
        self._oldest = 0
        """Number of the first row with priorities."""
        self._newest = 0
        """Number of the first row without priorities yet."""
        sharing = agents // storage.islands
        self._island = np.arange(agents) // sharing
        owner = np.arange(storage.width) * sharing // storage.width
        self._may_draw = (owner == np.arange(agents)[:, None] % sharing) | shared
        self._ids: list[int] = []
        """The agents that the priorities belong to."""
        self._pending: PendingErrors | None = None
        self._ranks, self._generation = 1, 1
        self._mass: Floats
        self._minimum: Floats
        self._beta: Floats
        self._own: np.random.Generator

    def begin(self, agents: Sequence[Agent], generation: int, ranks: int) -> None:
        """Start a generation with these agents, held by `ranks` ranks.

        An agent keeps its own priorities, or inherits its parent's. If neither is here, every transition is new to it.
        """
        self._set_priorities()
        super().begin(agents, generation, ranks)
        self._pending, self._generation, self._ranks = None, generation, ranks
        self._own = numpy_generator(self._seed, generation=generation, rank=self._rank, purpose="draws")
        self._generators["own"] = self._own
        owners = {id: index for index, id in enumerate(self._ids)}
        ancestors = (agent.id if agent.id in owners else agent.parent for agent in agents)
        sources = np.array([-1 if id is None else owners.get(id, -1) for id in ancestors])
        new = sources < 0
        if not self._ids:
            self._oldest, self._newest = self._storage.oldest, self._storage.written
        elif (sources != np.arange(len(sources))).any():
            self.tree.take_over(sources)
            self.maximum = np.where(new, FIRST_PRIORITY, self.maximum[sources])
        if new.any():
            for start, stop, mask in self._rows(self._oldest, self._newest):
                inherited = self.tree.leaves[:, start:stop]
                self.tree.fill(start, stop, np.where(new[:, None], mask * FIRST_PRIORITY, inherited))
        self._ids = [agent.id for agent in agents]

    def insert(self, td_error: Floats) -> None:
        """Set the first priorities of the T newest rows from td_errors [T, N], equal for all agents.

        A td_error that is not finite comes from an agent whose outputs overflow. Its transition gets the largest
        priority, so that the agent's own update finds the fault and stops that agent alone.
        """
        self._set_priorities()
        self._drop()
        self._add_rows((np.abs(td_error) + EPSILON) ** self._exponent)

    def local_totals(self) -> Floats:
        """The total, minimum and maximum priority [P], and the number of transitions [P] without one."""
        self._set_priorities()
        self._drop()
        # With exponent 0 all priorities are equal, so the minimum is the maximum and no search is needed.
        minimum = self.tree.minimum if self._exponent else self.maximum
        return np.concatenate([self.tree.total, minimum, self.maximum, self.fresh()])

    def fresh(self) -> Floats:
        """Number of transitions [P] written but without a priority."""
        rows = self._rows(self._newest, self._storage.written)
        return sum((mask.sum(1) for _, _, mask in rows), np.zeros(len(self.maximum)))

    def sync(self, sizes: Integers, steps: Floats, totals: Floats) -> None:
        """Give new transitions the largest priority over all ranks; record all ranks' totals and minima after that."""
        mass, minimum, maximum, fresh = totals.reshape(len(totals), 4, -1).swapaxes(0, 1)
        largest = maximum.max(0)
        self.maximum = largest
        self._add_rows()
        self._mass = mass + fresh * largest
        self._minimum = np.minimum(minimum, largest).min(0)
        self._beta = self.importance(self._generation, steps)

    def importance(self, generation: int, steps: Floats) -> Floats:
        """Importance-sampling exponent [P] after `steps` [P] of a generation, numbered from 1."""
        done = ((generation - 1) * self._generation_steps + steps) / self._max_steps
        start, end = self._importance.start, self._importance.end
        return np.asarray(start + np.clip(done, 0, 1) * (end - start))

    def draw(self, updates: int) -> Draws:
        """Draw indices for `updates` updates, with importance weights."""
        agents = len(self._draws)
        offset = self._shared.random((updates, agents))
        counts = share_of_draws(self._draws, self._mass, self._part, offset).T[..., None]
        # A rank without a draw still takes part, with a weight of zero.
        number = np.arange(max(1, int(counts.max())))
        shape = (agents, updates, len(number))
        fraction = (number + self._own.random(shape)) / np.maximum(counts, number + 1)
        index, priority = self.tree.find(fraction.reshape(agents, -1))
        index, priority = index.reshape(shape), priority.reshape(shape)
        in_share = number < counts
        if not in_share.all():
            # An agent with nothing to draw here gets arbitrary steps of weight zero.
            index, priority = np.where(priority > 0, index, 0), np.where(in_share, priority, 1.0)
        share = in_share * (self._ranks / self._draws)[:, None, None]
        weight = share * (self._minimum[:, None, None] / priority) ** self._beta[:, None, None]
        device, newest = self._storage.device, self._storage.written - 1
        td_errors = torch.zeros(updates, agents, len(number), device=device)
        active = torch.zeros(updates, agents, device=device)
        self._pending = PendingErrors(index, in_share, newest, self._oldest, td_errors, active)
        weights = [_by_update(values.astype(np.float32), device) for values in (weight, share)]
        return Draws(self._storage.index_in_islands(_by_update(index, device)), *weights)

    def observe(self, update: int, result: UpdateResult) -> None:
        """Buffer the td_errors of an update of the last draw; they become priorities before the next draw.

        Raises UserError if the algorithm returns none.
        """
        pending = self._pending
        if pending is None or not self._exponent:
            return
        if result.errors is None:
            raise UserError("replay.prioritised: this algorithm's loss gives no errors for priorities; leave it out")
        pending.errors[update] = result.errors
        pending.active[update] = 1.0 if result.active is None else result.active
        pending.observed.append(update)

    def set(self, index: Integers, priority: Floats, where: NDArray[np.bool_]) -> None:
        """Set `index` [P, K] to priorities [P, K] `where` [P, K]; the last of duplicates counts."""
        self.maximum = np.maximum(self.maximum, np.max(priority, 1, where=where, initial=0.0))
        self.tree.set(index, priority, where)

    def state_dict(self) -> Tensors:
        """The priorities [P, S] of the written rows of the ring, the maxima [P], and the agents' ids [P]."""
        self._set_priorities()
        self._drop()
        self._add_rows()
        leaf_count = rows_held(self._storage.written, self._storage.ring) * self._storage.width
        return {
            "priorities": torch.from_numpy(self.tree.leaves[:, :leaf_count].copy()),
            "priorities.maximum": torch.from_numpy(self.maximum.copy()),
            "priorities.agents": torch.tensor(self._ids, dtype=torch.int64),
        } | super().state_dict()

    def load_state_dict(self, state: Tensors) -> None:
        storage, agents = self._storage, len(self.maximum)
        leaf_count = rows_held(storage.written, storage.ring) * storage.width
        expected = {
            "priorities": ((agents, leaf_count), torch.float64),
            "priorities.maximum": ((agents,), torch.float64),
            "priorities.agents": ((agents,), torch.int64),
        }
        tensors = {name: value for name, value in state.items() if name.startswith(PRIORITIES)}
        check_tensors(tensors, expected, WHERE)
        super().load_state_dict({name: value for name, value in state.items() if name not in tensors})
        leaves, maximum = tensors["priorities"].numpy(), tensors["priorities.maximum"].numpy()
        if not (np.isfinite(leaves).all() and np.isfinite(maximum).all()):
            raise UserError(f"{WHERE}: a priority is not finite")
        self.tree.fill(0, leaf_count, leaves)
        self.maximum, self._ids = maximum.copy(), tensors["priorities.agents"].tolist()
        self._oldest, self._newest = storage.oldest, storage.written

    def _set_priorities(self) -> None:
        """Turn the buffered td_errors into priorities. Raises RunFailed if one is not finite."""
        pending = self._pending
        if pending is None or not pending.observed:
            return
        updates, pending.observed = pending.observed, []
        errors = pending.errors[updates].abs().double().cpu().numpy().swapaxes(0, 1)
        active = pending.active[updates].cpu().numpy().T > 0
        where = pending.in_share[:, updates]
        where = where if active.all() else where & active[..., None]
        if not np.isfinite(errors).all():
            lost = (~np.isfinite(errors) & where).any((1, 2))
            if lost.any():
                names = ", ".join(str(id) for id, one in zip(self._ids, lost, strict=True) if one)
                raise RunFailed(f"replay.prioritised: errors of agent {names} are not finite and make no priorities")
            errors = np.where(where, errors, 0.0)
        priority = (errors + EPSILON) ** self._exponent
        index, flat = pending.index[:, updates], (len(self._ids), -1)
        if self._oldest > pending.oldest:
            # Steps whose rows were overwritten since the draw belong to other transitions now.
            row = pending.newest - (pending.newest - index // self._storage.width) % self._storage.ring
            where = where & (row >= self._oldest)
        self.set(index.reshape(flat), priority.reshape(flat), where.reshape(flat))

    def _drop(self) -> None:
        """Forget the rows that can no longer be drawn."""
        for start, stop in self._pieces(self._oldest, min(self._storage.oldest, self._newest)):
            self.tree.fill(start, stop, 0.0)
        self._oldest = max(self._oldest, self._storage.oldest)
        self._newest = max(self._newest, self._oldest)

    def _add_rows(self, priority: Floats | None = None) -> None:
        """Give new rows the largest priority, or the finite priorities [T, N] among those of the T newest rows."""
        storage, wanted = self._storage, np.zeros((0, self._storage.lanes)) if priority is None else priority
        count = min(storage.written - self._newest, storage.ring)
        # A ring with fewer rows has kept only the last of them.
        wanted = wanted[max(0, len(wanted) - count) :]
        unknown = np.full((count - len(wanted), storage.lanes), np.nan)
        known, rows = np.concatenate([unknown, wanted]), list(self._rows(self._newest, storage.written))
        ends = np.cumsum([(stop - start) // storage.width for start, stop, _ in rows])[:-1]
        pieces = [self._by_agent(part) for part in np.split(known, ends)] if rows else []
        for (_, _, mask), values in zip(rows, pieces, strict=True):
            largest = np.max(values, 1, where=mask & np.isfinite(values), initial=0.0)
            self.maximum = np.maximum(self.maximum, largest)
        for (start, stop, mask), values in zip(rows, pieces, strict=True):
            new: Floats = np.where(np.isfinite(values), values, self.maximum[:, None])
            self.tree.fill(start, stop, mask * new)
        self._newest = storage.written

    def _rows(self, first: int, last: int) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
        """Yield ranges of leaves of the rows `first` to `last`, with the mask [P, S] of those each agent may draw."""
        storage = self._storage
        for start, stop in self._pieces(first, last):
            mask = np.tile(self._may_draw, (stop - start) // storage.width)
            if storage.gaps.any():
                valid = storage.flags["valid"][start // storage.width : stop // storage.width]
                mask &= self._by_agent(valid.cpu().numpy())
            yield start, stop, mask

    def _by_agent(self, values: NDArray[Any]) -> NDArray[Any]:
        """Of values [rows, N], those of each agent's island [P, S]."""
        islands = self._storage.islands
        parts = values.reshape(len(values), islands, -1).swapaxes(0, 1).reshape(islands, -1)
        by_agent: NDArray[Any] = parts[self._island]
        return by_agent

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield contiguous ranges of leaves of the rows `first` to `last` (excluded)."""
        ring, width = self._storage.ring, self._storage.width
        first = max(first, last - ring)
        while first < last:
            row = first % ring
            count = min(last - first, ring - row)
            yield row * width, (row + count) * width
            first += count


def _by_update(values: NDArray[np.int64] | NDArray[np.float32], device: torch.device) -> Tensor:
    """Convert values [P, U, B] to a tensor [U, P, B]."""
    return torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1))).to(device)
