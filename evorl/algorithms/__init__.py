"""What an algorithm says about itself, and the registry of those a configuration can name.

Axes: P agents of a stack, E environments, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evorl.algorithms.a2c import A2C, A2CSettings
from evorl.algorithms.dqn import DQN, DQNSettings
from evorl.algorithms.ppo import PPO, PPOSettings
from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.networks import Network
from evorl.networks.stacked import Stack
from evorl.replay import Actors, Pace
from evorl.settings import AlgorithmSettings
from evorl.spaces import Interface
from evorl.timing import Stopwatch
from evorl.types import Agent, Architecture, Batch, Decision, Loss, Observation, Recall, Tensors, Transition


class Experience(Protocol):
    """What the agents remember between steps, and which batches are due."""

    @property
    def period(self) -> int:
        """A generation has a multiple of so many steps of each environment."""

    def begin(self, population: Actors, generation: int) -> None:
        """Start a generation of these agents."""

    def add(self, transition: Transition, decision: Decision) -> None:
        """Remember what one step of all environments brought."""

    def due(self) -> Iterator[Batch]:
        """The batches to learn from now; every rank that holds the same agents gives equally many.

        First it tells the population by `acted` how many transitions those ranks have agreed on.
        """

    def end(self, agents: list[Agent]) -> None:
        """End the generation, leaving with the agents what is theirs."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """What a checkpoint keeps of this rank's part."""

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Take over what `state` gave. Raises UserError for what it could not have given."""


class Algorithm(Protocol):
    """How a stack of agents acts, what it remembers and what it minimises; it holds nothing of any agent."""

    @property
    def settings(self) -> AlgorithmSettings:
        """What the configuration says of the algorithm."""

    @property
    def interface(self) -> Interface:
        """What the environment shows and takes."""

    @property
    def networks(self) -> Mapping[str, Network]:
        """Each agent's networks by name; each has parameters, a target copy and an optimiser."""

    @property
    def losses(self) -> Mapping[str, Callable[[Stack, Batch], Loss]]:
        """For each network the loss that its parameters minimise; an update takes them in this order."""

    @property
    def statistics(self) -> Sequence[str]:
        """The names of what its losses say of themselves, `loss` first."""

    def first_architecture(self) -> Architecture:
        """A new agent's architecture."""

    def first_state(self) -> dict[str, float]:
        """The numbers of a new agent that acting and learning move."""

    def pace(self, copies: int) -> Pace:
        """How much and how often a new agent learns that so many ranks hold.

        Raises UserError where they cannot share its batches.
        """

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        """What this rank remembers; `always_valid` says that every step of every environment is a transition."""

    def act(
        self, stack: Stack, observation: Observation, recall: Recall | None, generator: torch.Generator
    ) -> tuple[Decision, Tensor | None]:
        """Decisions that explore, for observations [P, E, ...], and the memory after them."""

    def best(self, stack: Stack, observation: Observation, recall: Recall | None) -> tuple[Decision, Tensor | None]:
        """The best decisions known, for observations [P, E, ...], and the memory after them."""

    def value(self, stack: Stack, observation: Observation, recall: Recall | None) -> Tensor:
        """What is expected [P, E] from observations [P, E, ...]."""

    def learning_rate(self, stack: Stack) -> Tensor:
        """The learning rate [P] of the next update."""

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Note `steps` further transitions of each agent [P] or of every one, over all ranks."""

    def after_update(self, stack: Stack, due: Tensor) -> None:
        """Do what follows an update of the agents whose `due` [P] is 1."""


ALGORITHMS: Mapping[str, tuple[type[AlgorithmSettings], Callable[..., Algorithm]]] = {
    "a2c": (A2CSettings, A2C),
    "dqn": (DQNSettings, DQN),
    "ppo": (PPOSettings, PPO),
}
"""Settings and constructor of each algorithm."""

SETTINGS: Mapping[str, type[AlgorithmSettings]] = {name: settings for name, (settings, _) in ALGORITHMS.items()}


def make_algorithm(config: AnyConfig, interface: Interface) -> Algorithm:
    """The configured algorithm for what the environment shows and takes. Raises UserError where it cannot handle it."""
    _, constructor = ALGORITHMS[config.algorithm.name]
    return constructor(config, interface)


__all__ = ["ALGORITHMS", "SETTINGS", "Algorithm", "Experience", "make_algorithm"]
