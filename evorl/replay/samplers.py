"""Sampling from the replay of all ranks as one buffer: the base class, and uniform sampling.

Axes: U updates, P agents, B batch, R ranks; T rows and N lanes of a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.storage import WHERE, Storage
from evorl.seeding import numpy_generator, numpy_state, set_numpy_state, torch_generator
from evorl.system.formats import load_like
from evorl.types.agents import Agent
from evorl.types.batches import UpdateResult
from evorl.types.tensors import Tensors

PRIORITIES, DRAWS = "priorities", "draws."
"""Prefixes of a sampler's tensors in a state: what belongs to transitions, and the generators of a generation."""


class Draws(NamedTuple):
    """Draws for U updates, each [U, P, B]: their `indices`, `weight` in the loss, and `share` of the batch.

    Weights are shares times importance weights. Without importance weights both are equal and `share` is None.
    """

    indices: Tensor
    weight: Tensor
    share: Tensor | None

    def of(self, updates: slice) -> Draws:
        return Draws(self.indices[updates], self.weight[updates], None if self.share is None else self.share[updates])


def draws_per_update(agents: Sequence[Agent], transitions: int = 1) -> NDArray[np.int64]:
    """Draws [P] for a batch of each agent, where each counts as this many `transitions`."""
    batch_size = np.array([round(agent.hyperparameters["batch_size"]) for agent in agents])
    draws: NDArray[np.int64] = np.maximum(1, batch_size // transitions)
    return draws


class Sampler:
    """Draws the transitions of each update from the union of the replays of all ranks that hold the agents.

    Each rank draws its share from its own part, with replacement; no transition is communicated.
    """

    def __init__(
        self, storage: Storage, *, seed: int, rank: int, part: int, split_batches: bool, transitions: int = 1
    ) -> None:
        """This is the `part`-th of the ranks that hold the same agents, and the `rank`-th of all.

        With `split_batches`, batch sizes are totals over all ranks that hold an agent, otherwise per rank. Each draw
        counts as `transitions` transitions of a batch.
        """
        self._storage = storage
        self._seed, self._rank, self._part = seed, rank, part
        self._split_batches, self._transitions = split_batches, transitions
        self._draws: NDArray[np.int64]
        """Draws [P] per update of each agent, over all ranks together."""
        self._shared: np.random.Generator
        self._generators: dict[str, np.random.Generator | torch.Generator] = {}
        """The generators that this generation draws with; none between generations."""

    def begin(self, agents: Sequence[Agent], generation: int, ranks: int) -> None:
        """Start a generation with these agents, held by `ranks` ranks."""
        self._draws = draws_per_update(agents, self._transitions) * (1 if self._split_batches else ranks)
        self._shared = numpy_generator(self._seed, generation=generation, rank=0, purpose="share of draws")
        self._generators = {"shared": self._shared}

    def end(self) -> None:
        self._generators = {}

    def insert(self, td_error: NDArray[np.float64]) -> None:
        """Take actor-computed td_errors [T, N] of the T newest rows."""

    def local_totals(self) -> NDArray[np.float64]:
        """This rank's numbers [K] that all ranks need before the next draw."""
        return np.zeros(0)

    def sync(self, sizes: NDArray[np.int64], steps: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        """Take the numbers that all R ranks share; called in every vector step, even if nothing is drawn.

        `sizes` [R] are each rank's transitions, `steps` [P] each agent's steps in this generation over all ranks, and
        `totals` [R, K] the `local_totals` of each rank.
        """
        raise NotImplementedError

    def draw(self, updates: int) -> Draws:
        """Draw indices for `updates` updates."""
        raise NotImplementedError

    def observe(self, update: int, result: UpdateResult) -> None:
        """Take the result of an update of the last draw."""

    def state_dict(self) -> Tensors:
        """State of the sampler: that of its random generators; subclasses add priorities."""
        return {
            f"{DRAWS}{name}": numpy_state(source) if isinstance(source, np.random.Generator) else source.get_state()
            for name, source in self._generators.items()
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict`, after that of the storage. Raises UserError for an invalid one."""
        tensors = Sampler.state_dict(self)
        load_like(state, tensors, WHERE)
        for name, generator in self._generators.items():
            if isinstance(generator, torch.Generator):
                generator.set_state(tensors[f"{DRAWS}{name}"])
            else:
                set_numpy_state(generator, tensors[f"{DRAWS}{name}"])


def share_of_draws(
    draws: NDArray[np.int64], sizes: NDArray[np.int64] | NDArray[np.float64], rank: int, offset: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The number of `draws` [...] that fall on `rank`, which holds sizes[rank] of sizes [R].

    Systematic sampling (Madow 1949): with one `offset` [...] in [0, 1) shared by all ranks, rank r's count is the
    number of points of the grid (i + offset) in its interval of the union. Counts sum to `draws`, differ from their
    expectation by less than one, and have exactly that expectation, so each transition of the union is equally likely;
    with equal parts every rank draws the same number. Sizes may also be priority totals, per agent [R, P]; an agent
    with total 0 draws nothing.
    """
    edges = np.concatenate([np.zeros_like(sizes[:1]), sizes]).cumsum(0)
    whole = edges[-1]
    edges = edges / np.where(whole > 0, whole, 1)
    # The 1e-9 keeps a rounding error at an edge from moving a draw to the next rank.
    upper = np.floor(draws * edges[rank + 1] + offset + 1e-9)
    lower = np.floor(draws * edges[rank] + offset + 1e-9)
    return np.asarray(upper - lower, dtype=np.int64)


class UniformSampler(Sampler):
    """Every transition of the union of an agent's island is equally likely.

    Batches are as wide as the largest share of any agent. Each draw has weight R / draws, so that the mean over ranks
    of the weighted sums is the mean over the agent's draws from the union.
    """

    _sizes: NDArray[np.int64] | NDArray[np.float64]
    """The transitions of each rank [R], or of each rank that an agent may draw [R, P]."""
    _own: torch.Generator

    def begin(self, agents: Sequence[Agent], generation: int, ranks: int) -> None:
        super().begin(agents, generation, ranks)
        self._own = torch_generator(
            self._seed, generation=generation, rank=self._rank, purpose="draws", device=self._storage.device
        )
        self._generators["own"] = self._own

    def local_totals(self) -> NDArray[np.float64]:
        islands = self._storage.drawable_of_islands
        return islands.astype(np.float64) if len(islands) > 1 else np.zeros(0)

    def sync(self, sizes: NDArray[np.int64], steps: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        # Ranks in lockstep have equal parts of every island.
        self._sizes = totals.repeat(len(steps) // totals.shape[1], 1) if totals.size else sizes

    def draw(self, updates: int) -> Draws:
        agents = len(self._draws)
        offset = self._shared.random((updates, agents))
        counts = share_of_draws(self._draws, self._sizes, self._part, offset)
        # A rank without a draw still takes part, with a weight of zero.
        width = max(1, int(counts.max()))
        index = self._storage.draw((updates, agents, width), self._own)
        weight = (np.arange(width) < counts[..., None]) * len(self._sizes) / self._draws[:, None]
        return Draws(index, torch.from_numpy(weight.astype(np.float32)).to(index.device), None)
