"""The values that travel between the rooms. Axes: P agents, E environments, B batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter
from torch import Tensor
from typing_extensions import TypedDict

Tensors = dict[str, Tensor]
Roles = dict[str, Tensors]
"""The tensors of one network of one agent, by their role."""
ROLES = ("parameters", "buffers", "target", "mean", "square")
"""What is trained and what is not, and for each trained parameter its target copy and Adam's two moments."""

Decision = Mapping[str, Tensor]
"""What an agent decided in each environment: `action` [P, E, ...] for the environment, and whatever else its algorithm
wants to remember, such as the log-probability."""


class UserError(Exception):
    """A mistake that the user can mend: programs print it as one line and exit with code 2.

    Where all ranks have agreed on it, `told` says that another of them prints it. Null says that only this rank knows.
    """

    def __init__(self, message: str, told: bool | None = None) -> None:
        super().__init__(message)
        self.told = told


class RunFailed(RuntimeError):
    """What ends a run although the user has made no mistake: programs print it as one line and exit with code 1."""


class EvorlWarning(UserWarning):
    """Something the user should know although the run goes on."""


Observation = Mapping[str, Tensor]
"""What agents see, part by part [P, E, ...], with `action_mask` [P, E, A] where actions can be forbidden, and `started`
[P, E], true where an episode has just begun."""


@dataclass(frozen=True)
class Head:
    """An output of a network: `outputs` numbers for each observation.

    A `constant` head is a learned vector that does not depend on the observation. `near_zero` first weights make its
    first outputs almost the same everywhere.
    """

    name: str
    outputs: int
    constant: bool = False
    near_zero: bool = False


Streams = Literal["shared", "last", "all"]
"""Which hidden layers each head has for itself."""


Size = Annotated[int, Field(ge=1, le=65_536)]
Few = Annotated[int, Field(ge=0, le=1_000)]
"""Bounds within which a description of an agent is believed before anything is built from it."""


@dataclass(frozen=True)
class Convolution:
    """A convolutional layer without bounds at the left and top; `padding` zeros at the right and bottom.

    A kernel grows to the right and down and its padding with it, so what it puts out keeps its size. `residual_layers`
    3x3 layers follow, as in `Architecture`.
    """

    channels: Size
    kernel: Size
    stride: Size
    padding: Annotated[int, Field(ge=-1_000, le=1_000)] = 0
    residual_layers: Few = 0


@dataclass(frozen=True)
class Architecture:
    """The shapes of an agent's networks.

    `convolutions` read each image. `hidden_sizes` are the widths of the hidden layers; `residual_layers[k]` layers of
    the same width follow hidden layer k, each added to its input through a learned scale that starts at zero (ReZero,
    arXiv 2003.04887). A `recurrent` cell of `recurrent_size` units follows them.
    """

    hidden_sizes: tuple[Size, ...] = ()
    residual_layers: tuple[Few, ...] = ()
    activation: str | None = None
    layer_norm: bool = False
    streams: Streams = "shared"
    convolutions: tuple[Convolution, ...] = ()
    recurrent: str | None = None
    recurrent_size: Annotated[int, Field(ge=0, le=65_536)] = 0

    @property
    def layers(self) -> int:
        """The number of hidden layers, residual ones included."""
        return len(self.hidden_sizes) + sum(self.residual_layers)

    def sizes(self) -> dict[str, int]:
        """The width of each group of units, by the group's name, and the kernels'."""
        sizes = {f"hidden.{index}": width for index, width in enumerate(self.hidden_sizes)}
        sizes |= {f"channels.{index}": layer.channels for index, layer in enumerate(self.convolutions)}
        sizes |= {f"kernel.{index}": layer.kernel for index, layer in enumerate(self.convolutions)}
        return sizes | ({"recurrent": self.recurrent_size} if self.recurrent else {})

    def resized(self, group: str, size: int) -> Architecture:
        """The same architecture with another size for one group."""
        kind, _, number = group.partition(".")
        if kind == "recurrent":
            return replace(self, recurrent_size=size)
        index = int(number)
        if kind == "hidden":
            return replace(self, hidden_sizes=_put(self.hidden_sizes, index, size))
        layer = self.convolutions[index]
        if kind == "kernel":
            layer = replace(layer, kernel=size, padding=layer.padding + size - layer.kernel)
        else:
            layer = replace(layer, channels=size)
        return replace(self, convolutions=_put(self.convolutions, index, layer))

    def deepened(self, group: str, change: int) -> Architecture:
        """The same architecture with more or fewer residual layers after the layer of a group."""
        kind, _, number = group.partition(".")
        index = int(number)
        if kind == "hidden":
            depths = _put(self.residual_layers, index, self.residual_layers[index] + change)
            return replace(self, residual_layers=depths)
        layer = self.convolutions[index]
        layer = replace(layer, residual_layers=layer.residual_layers + change)
        return replace(self, convolutions=_put(self.convolutions, index, layer))

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: lists for tuples."""
        value: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return value


def seen_in(fields: Tensors, prefix: str) -> Tensors:
    """The observation whose parts stand among `fields` with this prefix."""
    return {name[len(prefix) :]: value for name, value in fields.items() if name.startswith(prefix)}


Item = TypeVar("Item")


def _put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


class Description(TypedDict):
    """Everything about an agent but its tensors, as JSON has it."""

    id: Annotated[int, Field(ge=0)]
    parent: Annotated[int, Field(ge=0)] | None
    mutation: str
    fitness: float | None
    fault: str | None
    architecture: Architecture
    hyperparameters: dict[str, float]
    state: dict[str, float]


Description.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
DESCRIPTIONS = TypeAdapter(list[Description])
"""Checks what a file says of its agents before it is believed."""


@dataclass
class Agent:
    """One member of the population, as a plain value between generations.

    `tensors` holds the roles of each of its networks, in their true shapes. `state` holds numbers that acting and
    learning move, such as `epsilon`. `mutation` says what distinguished the agent from its parent at birth, `fault` why
    it stopped learning before its generation ended.
    """

    id: int
    architecture: Architecture
    hyperparameters: dict[str, float]
    tensors: dict[str, Roles]
    state: dict[str, float]
    parent: int | None = None
    mutation: str = "founder"
    fitness: float | None = None
    fault: str | None = None

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
            "fault": self.fault,
            "architecture": self.architecture.to_json(),
            "hyperparameters": dict(self.hyperparameters),
            "state": dict(self.state),
        }


@dataclass
class Transition:
    """One step of every environment; all tensors lead with [P, E].

    `next_observation` is what the action led to, also at the end of an episode. `terminated` means that nothing follows
    it (do not bootstrap), `truncated` that the episode was cut there (do). Where `valid` is false the environment only
    reset itself and there is no transition; `all_valid` says that this happened nowhere, `any_truncated` that an
    episode was cut somewhere.
    """

    observation: Observation
    reward: Tensor
    next_observation: Observation
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    all_valid: bool = True
    any_truncated: bool = False


@dataclass
class Recall:
    """What recurrent agents need beside what they see. Axes: T time, S sequences, K numbers for each of N units.

    `memory` [P, S, K, N] is what was remembered before the first step, `started` [P, T, S] where episodes begin.
    """

    memory: Tensor
    started: Tensor

    def part(self, agents: slice, units: int) -> Recall:
        """That of some of the agents, whose memory has so many units."""
        return Recall(self.memory[agents, ..., :units], self.started[agents])


@dataclass
class Batch:
    """What one update of the population learns from.

    `fields` are [P, B, ...]. A loss is the sum over B of `weight` [P, B] times its elements, which makes it the mean
    over each agent's own batch whatever its size. Agents whose `due` [P] is 0 sit this update out; one that stops
    learning from this experience before its end gets its `due` set to 0.

    Sequences for recurrent agents stand time-major in B = T * S, with their `recall`.
    """

    fields: Tensors
    weight: Tensor
    due: Tensor
    recall: Recall | None = None

    def part(self, agents: slice, units: int = 0) -> Batch:
        """The batch of some of the agents, whose memory has so many units."""
        return Batch(
            {name: value[agents] for name, value in self.fields.items()},
            self.weight[agents],
            self.due[agents],
            None if self.recall is None else self.recall.part(agents, units),
        )


@dataclass
class Loss:
    """What a stack of agents minimises: `value` [P].

    `statistics` [P] are for people. An agent whose `divergence` [P] from the policy that gathered the batch, averaged
    over ranks, exceeds `limit` [P] is not updated and learns no more from this experience.
    """

    value: Tensor
    statistics: Tensors = field(default_factory=dict)
    divergence: Tensor | None = None
    limit: Tensor | None = None
