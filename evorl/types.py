"""The values that travel between the rooms. Axes: P agents, E environments, B batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]
Roles = dict[str, Tensors]
"""The tensors of one network of one agent, by their role."""
ROLES = ("parameters", "buffers", "target", "mean", "square")
"""What is trained and what is not, and for each trained parameter its target copy and Adam's two moments."""

Decision = Mapping[str, Tensor]
"""What an agent decided in each environment: `action` [P, E] and whatever else its algorithm wants to remember."""


class UserError(Exception):
    """A mistake that the user can mend: programs print it as one line and exit with code 2.

    `told` says that another process prints it.
    """

    def __init__(self, message: str, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


class EvorlWarning(UserWarning):
    """Something the user should know although the run goes on."""


@dataclass(frozen=True)
class Architecture:
    """The shapes of an agent's networks.

    `hidden_sizes` are the widths of the hidden layers; `residual_layers[k]` layers of the same width follow hidden
    layer k, each added to its input through a learned scale that starts at zero (ReZero, arXiv 2003.04887).
    """

    hidden_sizes: tuple[int, ...] = ()
    residual_layers: tuple[int, ...] = ()
    activation: str | None = None
    layer_norm: bool = False
    dueling: bool = False

    @property
    def layers(self) -> int:
        """The number of hidden layers, residual ones included."""
        return len(self.hidden_sizes) + sum(self.residual_layers)

    def sizes(self) -> dict[str, int]:
        """The width of each group of units, by the group's name."""
        return {f"hidden.{index}": width for index, width in enumerate(self.hidden_sizes)}

    def resized(self, group: str, width: int) -> Architecture:
        """The same architecture with another width for one group of units."""
        sizes = self.sizes() | {group: width}
        return replace(self, hidden_sizes=tuple(sizes.values()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"hidden_sizes": list(self.hidden_sizes), "residual_layers": list(self.residual_layers)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Architecture:
        lists = {key: tuple(value[key]) for key in ("hidden_sizes", "residual_layers")}
        return cls(**{**value, **lists})


@dataclass
class Agent:
    """One member of the population, as a plain value between generations.

    `tensors` holds the roles of each of its networks, in their true shapes. `state` holds numbers that acting and
    learning move, such as `epsilon`. `mutation` says what distinguished the agent from its parent at birth.
    """

    id: int
    architecture: Architecture
    hyperparameters: dict[str, float]
    tensors: dict[str, Roles]
    state: dict[str, float]
    parent: int | None = None
    mutation: str = "founder"
    fitness: float | None = None

    def child(self, id: int) -> Agent:
        """A copy with its own identity and tensors, and no fitness yet."""
        return replace(copy.deepcopy(self), id=id, parent=self.id, mutation="none", fitness=None)

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        return {
            "id": self.id,
            "parent": self.parent,
            "mutation": self.mutation,
            "fitness": self.fitness,
            "architecture": self.architecture.to_json(),
            "hyperparameters": dict(self.hyperparameters),
            "state": dict(self.state),
        }

    @classmethod
    def from_description(cls, value: Mapping[str, Any], tensors: dict[str, Roles]) -> Agent:
        return cls(**{**value, "architecture": Architecture.from_json(value["architecture"]), "tensors": tensors})


@dataclass
class Transition:
    """One step of every environment; all tensors lead with [P, E].

    `next_observation` is what the action led to, also at the end of an episode. `terminated` means that nothing follows
    it (do not bootstrap), `truncated` that the episode was cut there (do). Where `valid` is false the environment only
    reset itself and there is no transition; `all_valid` says that this happened nowhere.
    """

    observation: Tensor
    reward: Tensor
    next_observation: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    all_valid: bool = True


@dataclass
class Batch:
    """What one update of the population learns from.

    `fields` are [P, B, ...]. A loss is the sum over B of `weight` [P, B] times its elements, which makes it the mean
    over each agent's own batch whatever its size. Agents whose `due` [P] is 0 sit this update out.
    """

    fields: Tensors
    weight: Tensor
    due: Tensor

    def part(self, agents: slice) -> Batch:
        """The batch of some of the agents."""
        return Batch(
            {name: value[agents] for name, value in self.fields.items()}, self.weight[agents], self.due[agents]
        )
