"""The protocols of experiences and algorithms. Axes: P agents, E environments, B batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from evorl.algorithms.objective import Objective
from evorl.config.fields import AlgorithmSettings
from evorl.distributed import Placement
from evorl.envs.spec import EnvSpec
from evorl.networks.spec import NetworkSpec
from evorl.networks.stacked import Stack
from evorl.replay import Pace, Population
from evorl.system.timing import Stopwatch
from evorl.types import (
    Agent,
    Batch,
    Observation,
    PolicyOutput,
    RecurrentInput,
    Tensors,
    Transition,
    UpdateResult,
)


class Experience(Protocol):
    """Storage of what the agents experience, which gives the batches that are due."""

    @property
    def period(self) -> int:
        """Return the number of steps of each environment that a generation has a multiple of."""

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation of these agents."""

    def batches(self) -> Iterator[Batch]:
        """Yield the batches to learn from now; every rank that holds the same agents gives equally many.

        First it tells the policy by `acted` how many transitions those ranks have agreed on.
        """

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Take note of what became of a batch, before the next one is asked for."""

    def end(self, agents: list[Agent]) -> None:
        """End the generation, leaving with the agents what is theirs."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Return what a checkpoint keeps of this rank's part."""

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Take over what `state` gave. Raises UserError for what it could not have given."""


class OnlineExperience(Experience, Protocol):
    """One that is given every step of this process's environments."""

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments."""


class ReceivingExperience(Experience, Protocol):
    """One that is given what actor processes did."""

    def extend(self, slot: Any) -> None:
        """Take what stands in a slot of shared memory, which may be overwritten afterwards."""


class Algorithm(Protocol):
    """A stack of agents: their actions, what they store and their losses; it holds nothing of any agent."""

    @property
    def settings(self) -> AlgorithmSettings:
        """Return what the configuration says of the algorithm."""

    @property
    def interface(self) -> EnvSpec:
        """Return what the environment shows and takes."""

    @property
    def networks(self) -> Mapping[str, NetworkSpec]:
        """Return each agent's networks by name."""

    @property
    def objectives(self) -> Sequence[Objective]:
        """Return what an update minimises, in this order."""

    @property
    def metrics(self) -> Sequence[str]:
        """Return the names of what its losses report."""

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Return the shape [K, N] of the exploration noise that goes on from step to step in each environment.

        It is handed through `act` as the recurrent state, which is zero where episodes start; zeros without such noise.
        """

    def initial_state(self) -> dict[str, float]:
        """Return the part of a new agent's state that acting changes, by name: numbers of at least 0."""

    def actor_state(self, index: int, count: int) -> Mapping[str, float]:
        """Return in what the acting state of actor `index` of `count`, over all ranks, differs from the learner's."""

    def pace(self, copies: int) -> Pace:
        """Return how much and how often a new agent learns that so many ranks hold.

        Raises UserError where they cannot share its batches.
        """

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Any:
        """Return what this rank stores, an `OnlineExperience`, or a `ReceivingExperience` where actors send something.

        `always_valid` says that every step of every environment is a transition.
        """

    def act(
        self,
        stack: Stack,
        observation: Observation,
        recurrent: RecurrentInput | None,
        generator: torch.Generator,
        deterministic: bool,
    ) -> tuple[Tensor, Tensors, Tensor | None]:
        """Return actions [P, E, ...] for observations [P, E, ...], what else to store, and the next recurrent state."""

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """Return what is expected [P, E] from observations [P, E, ...]."""

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Note `steps` further transitions of each agent [P] or of every one, over all ranks."""
