"""Uniform sampling from all ranks' replay as one buffer. Axes: U updates, P agents, B batch, R ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.protocols import Agreement, Draws
from evorl.replay.storage import WHERE, Storage
from evorl.seeding import numpy_generator, numpy_state, set_numpy_state, torch_generator
from evorl.system.formats import check_tensors, load_like, set_generator
from evorl.types import Agent, Tensors, UpdateResult


@dataclass(frozen=True)
class SamplerSettings:
    """Seed of the draws, and this rank's place: `part` among the ranks of the same agents, `rank` among all.

    With `split_batches`, batch sizes are totals over all ranks that hold an agent, otherwise per rank.
    """

    seed: int
    rank: int
    part: int
    split_batches: bool

    def draws(self, agents: Sequence[Agent], ranks: int) -> NDArray[np.int64]:
        """Return the draws [P] per update of each agent, over all `ranks` together."""
        batch_size = np.array([round(agent.hyperparameters["batch_size"]) for agent in agents])
        return batch_size if self.split_batches else batch_size * ranks

    def shared(self, generation: int) -> np.random.Generator:
        """Return a random generator that gives the same numbers on every rank."""
        return numpy_generator(self.seed, generation=generation, rank=0, purpose="share of draws")


def share_of_draws(
    draws: NDArray[np.int64], sizes: NDArray[np.int64] | NDArray[np.float64], rank: int, offset: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return how many of `draws` [...] fall on `rank`, which holds sizes[rank] of sizes [R].

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


class DistributedSampler:
    """Each rank draws its share from its own replay, with replacement; no transition is communicated.

    `draws` [P] are per update of an agent, over all R ranks. Batches are [U, P, B] with B the largest share of any
    agent; each draw has weight R / draws, so the mean over ranks of the weighted sums is the mean over the agent's
    draws from the union.
    The generator `shared` must give the same numbers on every rank, `own` different ones.
    """

    def __init__(self, rank: int, draws: NDArray[np.int64], shared: np.random.Generator, own: torch.Generator) -> None:
        self._rank = rank
        self._draws = draws
        self._shared = shared
        self._own = own
        self._weights: dict[tuple[int, ...], Tensor] = {}

    def generators(self) -> Tensors:
        """Return the states of both generators, as bytes."""
        return {"shared": numpy_state(self._shared), "own": self._own.get_state()}

    def resume(self, generators: Tensors) -> None:
        """Load the output of `generators`. Raises UserError for an invalid one."""
        own = self.generators()
        load_like(generators, own, WHERE)
        set_numpy_state(self._shared, own["shared"])
        set_generator(self._own, own["own"], WHERE)

    def draw(self, updates: int, sizes: NDArray[np.int64], drawable: int) -> tuple[Tensor, Tensor]:
        """Return positions [U, P, B] in this rank's replay, below `drawable`, and their weights [U, P, B].

        `sizes` [R] are the sizes that all ranks agreed on; a rank may hold fewer where environments failed.
        """
        agents = len(self._draws)
        offset = self._shared.random((updates, agents))
        counts = share_of_draws(self._draws, sizes, self._rank, offset)
        # A rank without a draw still takes part, with a weight of zero.
        width = max(1, int(counts.max()))
        index = torch.randint(max(1, drawable), (updates, agents, width), generator=self._own, device=self._own.device)
        return index, self._weight(counts, width, len(sizes))

    def _weight(self, counts: NDArray[np.int64], width: int, ranks: int) -> Tensor:
        key = (*counts.shape, *counts.ravel().tolist())
        weight = self._weights.get(key)
        if weight is None:
            drawn = np.arange(width) < counts[..., None]
            values = drawn * ranks / self._draws[:, None]
            weight = torch.from_numpy(values.astype(np.float32)).to(self._own.device)
            self._weights = {key: weight}
        return weight


class UniformSampler:
    """Draws uniformly from the union of all ranks' transitions."""

    def __init__(self, storage: Storage, settings: SamplerSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._sampler: DistributedSampler
        self._sizes: NDArray[np.int64]

    def begin(self, agents: Sequence[Agent], generation: int, ranks: int) -> None:
        """Start a generation with these agents, held by `ranks` ranks."""
        settings, device = self._settings, self._storage.device
        self._sampler = DistributedSampler(
            settings.part,
            settings.draws(agents, ranks),
            shared=settings.shared(generation),
            own=torch_generator(
                settings.seed, generation=generation, rank=settings.rank, purpose="draws", device=device
            ),
        )

    def insert(self, errors: NDArray[np.float64]) -> None:
        """Do nothing: uniform draws ignore errors."""

    def report(self) -> NDArray[np.float64]:
        """Return nothing: the sizes are exchanged anyway."""
        return np.zeros(0)

    def agree(self, known: Agreement) -> None:
        """Record the sizes of all ranks' replays."""
        self._sizes = known.sizes

    def draw(self, updates: int) -> Draws:
        """Draw slots for `updates` updates, all with equal importance."""
        index, weight = self._sampler.draw(updates, self._sizes, self._storage.drawable)
        return Draws(self._storage.nth(index), weight, None)

    def observe(self, update: int, result: UpdateResult) -> None:
        """Do nothing: uniform draws ignore errors."""

    def generators(self) -> Tensors:
        """Return the states of the random generators, as bytes by name."""
        return self._sampler.generators()

    def resume(self, generators: Tensors) -> None:
        """Load the output of `generators`. Raises UserError for an invalid one."""
        self._sampler.resume(generators)

    def state(self) -> Tensors:
        """Return nothing: random generators are reseeded each generation."""
        return {}

    def restore(self, tensors: Tensors, numbers: Mapping[str, int]) -> None:
        """Raise UserError unless `tensors` is empty."""
        check_tensors(tensors, {}, WHERE)
