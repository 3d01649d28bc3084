"""Agents between generations: plain values that evolution changes and checkpoints hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from evorl.types.tensors import Roles

Words = Annotated[str, Field(max_length=1_000)]
Number = Annotated[int, Field(ge=0, le=10**15)]
Measured = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A number bounded so that reports can square and sum it without overflow."""
EXP_AVG, EXP_AVG_SQ = "mean", "square"
"""The roles of Adam's first and second moments, as checkpoints name them."""
ROLES = ("parameters", "buffers", "target", EXP_AVG, EXP_AVG_SQ)
"""Parameters and buffers (not trained); for each parameter its copy in the target network and Adam's moments."""


@dataclass(frozen=True)
class Mutation:
    """A mutation as it is recorded in the lineage.

    `kind` is its name in the registry, `target` what it changed, such as a hyperparameter, with the value before and
    after.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    kind: Words
    target: Words = ""
    before: int | float | Words | None = None
    after: int | float | Words | None = None

    def with_effective_values(self, use: Callable[[str, float], float]) -> Mutation:
        """Convert hyperparameter values to those that training uses, such as whole numbers, by `use(name, value)`."""
        if self.kind != "hyperparameters":
            return self
        before, after = (
            use(self.target, value) if isinstance(value, int | float) else value for value in (self.before, self.after)
        )
        if before == after and self.after is not None and after is not None:
            after = f"{_shown(self.after)} (used as {_shown(after)})"
        return replace(self, before=before, after=after)

    def __str__(self) -> str:
        ends = [_shown(value) for value in (self.before, self.after) if value is not None]
        detail = ": ".join(part for part in (self.target, " -> ".join(ends)) if part)
        return f"{self.kind} ({detail})" if detail else self.kind


def _shown(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


INITIAL = Mutation("initial")
UNCHANGED = ("initial", "none")
"""The kinds of records that change nothing."""


FEATURES = "features"
"""The head that stands for the last hidden layer's output."""


@dataclass(frozen=True)
class Head:
    """An output head of a network, with `outputs` numbers per observation.

    A `constant` head is a learned vector independent of the observation. `near_zero` initialises small weights, so that
    the initial outputs are almost the same for all observations. `bias` is the initial bias, or a constant head's
    initial output. A `per_feature` head is a learned matrix [N, outputs] independent of the observation, with a row for
    each of the N features that the first head reads. With a head named `FEATURES`, which has no parameters and no
    `outputs` of its own, a network also gives those features [P, B, N].
    """

    name: str
    outputs: int
    constant: bool = False
    near_zero: bool = False
    bias: float = 0.0
    per_feature: bool = False

    @property
    def computed(self) -> bool:
        """True for a linear layer on the features, False for learned constants and the features themselves."""
        return not (self.constant or self.per_feature or self.name == FEATURES)


Branches = Literal["shared", "last", "all"]
"""The hidden layers of which each head has its own copy: none (`shared`), the last one, or all."""


Width = Annotated[int, Field(ge=1, le=65_536)]
Depth = Annotated[int, Field(ge=0, le=1_000)]
Total = Annotated[float, Field(ge=0, le=1e15)]
"""Bounds for agent descriptions, validated before anything is built from them."""


@dataclass(frozen=True)
class Convolution:
    """A convolutional layer, followed by `residual_layers` 3x3 layers as in `Architecture`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    channels: Width
    kernel: Width
    stride: Width
    residual_layers: Depth = 0


@dataclass(frozen=True)
class Architecture:
    """The architecture of one of an agent's networks.

    `convolutions` process each image. `hidden_sizes` are the widths of the hidden layers; `residual_layers[k]` layers
    of the same width follow hidden layer k, each added to its input through a learned scale initialised to zero
    (ReZero, arXiv 2003.04887). A `recurrent` cell of `recurrent_size` units comes last.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    hidden_sizes: tuple[Width, ...] = ()
    residual_layers: tuple[Depth, ...] = ()
    activation: str | None = None
    layer_norm: bool = False
    branches: Branches = "shared"
    convolutions: tuple[Convolution, ...] = ()
    recurrent: str | None = None
    recurrent_size: Annotated[int, Field(ge=0, le=65_536)] = 0

    @property
    def layers(self) -> int:
        """The number of hidden layers, including residual ones."""
        return len(self.hidden_sizes) + sum(self.residual_layers)

    def sizes(self) -> dict[str, int]:
        """The width of each group of units: `hidden.0`, `channels.0`, `recurrent`, ..."""
        sizes = {f"hidden.{index}": width for index, width in enumerate(self.hidden_sizes)}
        sizes |= {f"channels.{index}": layer.channels for index, layer in enumerate(self.convolutions)}
        return sizes | ({"recurrent": self.recurrent_size} if self.recurrent else {})

    def resized(self, group: str, size: int) -> Architecture:
        """Give one group of units another width."""
        kind, _, number = group.partition(".")
        if kind == "recurrent":
            return replace(self, recurrent_size=size)
        index = int(number)
        if kind == "hidden":
            return replace(self, hidden_sizes=_put(self.hidden_sizes, index, size))
        layer = replace(self.convolutions[index], channels=size)
        return replace(self, convolutions=_put(self.convolutions, index, layer))

    def deepened(self, group: str, change: int) -> Architecture:
        """Add `change` residual layers after the layer of a group (remove them if negative)."""
        kind, _, number = group.partition(".")
        index = int(number)
        if kind == "hidden":
            depths = _put(self.residual_layers, index, self.residual_layers[index] + change)
            return replace(self, residual_layers=depths)
        layer = self.convolutions[index]
        layer = replace(layer, residual_layers=layer.residual_layers + change)
        return replace(self, convolutions=_put(self.convolutions, index, layer))

    def depth(self, group: str) -> int:
        """The number of residual layers after the layer of a group."""
        kind, _, index = group.partition(".")
        return self.residual_layers[int(index)] if kind == "hidden" else self.convolutions[int(index)].residual_layers


Item = TypeVar("Item")


def _put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


@dataclass
class RewardStats:
    """Running statistics of discounted reward sums, used for reward scaling."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    count: Total = 0.0
    mean: float = 0.0
    variance: Annotated[float, Field(ge=0)] = 0.0


@dataclass
class AgentState:
    """An agent's mutable state besides its tensors, changed by acting and learning.

    `acting` belongs to the algorithm, such as an exploration rate; `updates` counts the optimiser steps of each
    network; `update_debt` is the fraction of an update earned by acting and not yet due.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    acting: dict[str, float] = field(default_factory=dict)
    updates: dict[str, Total] = field(default_factory=dict)
    update_debt: Annotated[float, Field(ge=0, le=1)] = 0.0
    rewards: RewardStats = field(default_factory=RewardStats)

    def metrics(self) -> dict[str, float]:
        """All values by name, as in metrics files and curves."""
        updates = {f"updates/{network}": count for network, count in self.updates.items()}
        return (
            self.acting
            | updates
            | {"update_debt": self.update_debt}
            | {f"rewards/{name}": value for name, value in asdict(self.rewards).items()}
        )


@dataclass
class Description:
    """An agent without its tensors, as files have it.

    `architectures` are those of each of its networks. `parent` is the id of the agent it was copied from,
    `parent_generation` the generation after which that happened. `fault` says why it stopped learning before its
    generation ended. `ranks` are its fitness ranks in the last two generations, between 0 (worst) and 1 (best), with
    `burn_in: auto`; a new agent starts with its parent's.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    id: Number
    architectures: dict[str, Architecture]
    hyperparameters: dict[str, float]
    state: AgentState = field(default_factory=AgentState)
    parent: Number | None = None
    parent_generation: Number | None = None
    mutation: Mutation = INITIAL
    fitness: float | None = None
    fault: Annotated[str, Field(max_length=10_000)] | None = None
    ranks: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=100)] = ()


@dataclass
class Agent(Description):
    """One member of the population, as a plain value between generations.

    `tensors` are those of each of its networks by role, in their unpadded shapes.
    """

    tensors: dict[str, Roles] = field(default_factory=dict, repr=False)

    def child(self, id: int, generation: int | None = None) -> Agent:
        """Copy the agent after `generation`, with a new id, its own tensors and no fitness yet."""
        born = Mutation("none")
        copied = copy.deepcopy(self)
        return replace(copied, id=id, parent=self.id, parent_generation=generation, mutation=born, fitness=None)

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        plain = Description(**{each.name: getattr(self, each.name) for each in fields(Description)})
        described: dict[str, Any] = json.loads(json.dumps(asdict(plain)))
        return described
