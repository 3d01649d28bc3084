"""What an algorithm says about itself, and the registry of those a configuration can name.

Axes: P agents of a stack, E environments, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import gymnasium as gym
import torch
from torch import Tensor

from evorl.algorithms.dqn import DQN, DQNSettings
from evorl.config import AlgorithmSettings, AnyConfig
from evorl.distributed import Placement
from evorl.networks import Network
from evorl.networks.stacked import Stack
from evorl.timing import Stopwatch
from evorl.types import Agent, Batch, Decision, Tensors, Transition


class Experience(Protocol):
    """What the agents remember between steps, and which batches are due."""

    def begin(self, agents: Sequence[Agent], generation: int) -> None:
        """Start a generation of these agents."""

    def add(self, transition: Transition, decision: Decision) -> None:
        """Remember what one step of all environments brought."""

    def due(self) -> Iterator[Batch]:
        """The batches to learn from now; every rank that holds the same agents gives equally many."""

    def end(self, agents: Sequence[Agent]) -> None:
        """End the generation, leaving with the agents what is theirs."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """What a checkpoint keeps of this rank's part."""

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Take over what `state` gave."""


class Algorithm(Protocol):
    """How a stack of agents acts, what it remembers and what it minimises; it holds nothing of any agent."""

    @property
    def networks(self) -> Mapping[str, Network]:
        """Each agent's networks by name; each has parameters, a target copy and an optimiser."""

    @property
    def losses(self) -> Mapping[str, Callable[[Stack, Batch], Tensor]]:
        """For each network the loss [P] that its parameters minimise; an update takes them in this order."""

    @property
    def widths(self) -> tuple[int, int]:
        """How wide the networks' inputs and outputs are, all networks together."""

    def first_hyperparameters(self) -> dict[str, float]:
        """A new agent's hyperparameters: `learning_rate`, `max_grad_norm` if gradients are clipped, and its own."""

    def first_state(self) -> dict[str, float]:
        """The numbers of a new agent that acting and learning move."""

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        """What this rank remembers; `always_valid` says that every step of every environment is a transition."""

    def act(self, stack: Stack, observation: Tensor, generator: torch.Generator) -> Decision:
        """Decisions that explore, for observations [P, E, ...]."""

    def best(self, stack: Stack, observation: Tensor) -> Decision:
        """The best decisions known, for observations [P, E, ...]."""

    def after_acting(self, stack: Stack, steps: int) -> None:
        """Note `steps` further environment steps of each agent."""

    def after_update(self, stack: Stack, due: Tensor) -> None:
        """Do what follows an update of the agents whose `due` [P] is 1."""


ALGORITHMS: Mapping[str, tuple[type[AlgorithmSettings], Callable[..., Algorithm]]] = {
    "dqn": (DQNSettings, DQN),
}
"""Settings and constructor of each algorithm."""

SETTINGS: Mapping[str, type[AlgorithmSettings]] = {name: settings for name, (settings, _) in ALGORITHMS.items()}


def make_algorithm(config: AnyConfig, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Algorithm:
    """The configured algorithm for these spaces. Raises UserError where it cannot handle them."""
    _, constructor = ALGORITHMS[config.algorithm.name]
    return constructor(config, observation_space, action_space)


__all__ = ["ALGORITHMS", "SETTINGS", "Algorithm", "Experience", "make_algorithm"]
