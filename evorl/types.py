"""The values that travel between the rooms. Axes: P agents, E environments, B batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import Tensor

from evorl.records import INITIAL, Mutation

Tensors = dict[str, Tensor]
Roles = dict[str, Tensors]
"""The tensors of one network of one agent, by their role."""
ROLES = ("parameters", "buffers", "target", "mean", "square")
"""Trained and untrained tensors, and for each trained parameter its target copy and Adam's two moments."""


class UserError(Exception):
    """A mistake that the user can mend: programs print it as one line and exit with code 2.

    Where all ranks have agreed on it, `reported_elsewhere` says that another of them prints it. Null says that only
    this rank knows of it.
    """

    def __init__(self, message: str, reported_elsewhere: bool | None = None) -> None:
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


class RunFailed(RuntimeError):
    """An end of a run without a mistake of the user: programs print it as one line and exit with code 1."""


class EvorlWarning(UserWarning):
    """Something the user should know although the run goes on."""


Observation = Mapping[str, Tensor]
"""Observations, part by part [P, E, ...], with `action_mask` [P, E, A] where actions can be forbidden."""


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
"""The hidden layers that each head has for itself."""


Size = Annotated[int, Field(ge=1, le=65_536)]
Few = Annotated[int, Field(ge=0, le=1_000)]
Total = Annotated[float, Field(ge=0, le=1e15)]
"""Bounds on a description of an agent, validated before anything is built from it."""


@dataclass(frozen=True)
class Convolution:
    """A convolutional layer without bounds at the left and top; `padding` zeros at the right and bottom.

    A kernel grows to the right and down and its padding with it, so what it puts out keeps its size. `residual_layers`
    3x3 layers follow, as in `Architecture`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    channels: Size
    kernel: Size
    stride: Size
    padding: Annotated[int, Field(ge=-1_000, le=1_000)] = 0
    residual_layers: Few = 0


@dataclass(frozen=True)
class Architecture:
    """The shapes of one of an agent's networks.

    `convolutions` read each image. `hidden_sizes` are the widths of the hidden layers; `residual_layers[k]` layers of
    the same width follow hidden layer k, each added to its input through a learned scale that starts at zero (ReZero,
    arXiv 2003.04887). A `recurrent` cell of `recurrent_size` units follows them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

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
        """Return the number of hidden layers, residual ones included."""
        return len(self.hidden_sizes) + sum(self.residual_layers)

    def sizes(self) -> dict[str, int]:
        """Return the width of each group of units, by the group's name, and the kernels'."""
        sizes = {f"hidden.{index}": width for index, width in enumerate(self.hidden_sizes)}
        sizes |= {f"channels.{index}": layer.channels for index, layer in enumerate(self.convolutions)}
        sizes |= {f"kernel.{index}": layer.kernel for index, layer in enumerate(self.convolutions)}
        return sizes | ({"recurrent": self.recurrent_size} if self.recurrent else {})

    def resized(self, group: str, size: int) -> Architecture:
        """Return the same architecture with another size for one group."""
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
        """Return the same architecture with more or fewer residual layers after the layer of a group."""
        kind, _, number = group.partition(".")
        index = int(number)
        if kind == "hidden":
            depths = _put(self.residual_layers, index, self.residual_layers[index] + change)
            return replace(self, residual_layers=depths)
        layer = self.convolutions[index]
        layer = replace(layer, residual_layers=layer.residual_layers + change)
        return replace(self, convolutions=_put(self.convolutions, index, layer))

    def depth(self, group: str) -> int:
        """Return the number of residual layers after the layer of a group."""
        kind, _, index = group.partition(".")
        return self.residual_layers[int(index)] if kind == "hidden" else self.convolutions[int(index)].residual_layers

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it: lists for tuples."""
        value: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return value


Item = TypeVar("Item")


def _put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


@dataclass
class RewardStats:
    """Running statistics of discounted sums of rewards, by which rewards are scaled."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    count: Total = 0.0
    mean: float = 0.0
    variance: Annotated[float, Field(ge=0)] = 0.0


@dataclass
class AgentState:
    """The values of one agent that acting and learning change, each under its owner.

    `acting` belongs to the algorithm, such as an exploration rate; `updates` are the optimiser steps of each network;
    `update_debt` is the share of an update that was earned by acting and is not yet due.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    acting: dict[str, float] = field(default_factory=dict)
    updates: dict[str, Total] = field(default_factory=dict)
    update_debt: Annotated[float, Field(ge=0, le=1)] = 0.0
    rewards: RewardStats = field(default_factory=RewardStats)

    def metrics(self) -> dict[str, float]:
        """Return all of them by name, as files of metrics and curves show them."""
        updates = {f"updates/{network}": count for network, count in self.updates.items()}
        return (
            self.acting
            | updates
            | {"update_debt": self.update_debt}
            | {f"rewards/{name}": value for name, value in asdict(self.rewards).items()}
        )


@dataclass
class Agent:
    """One member of the population, as a plain value between generations.

    `architectures` and `tensors` are those of each of its networks, the latter by role and in their true shapes.
    `parent` is the identity of the agent that it was copied from, and `parent_generation` the one after which that was.
    `fault` says why it stopped learning before its generation ended.
    """

    id: int
    architectures: dict[str, Architecture]
    hyperparameters: dict[str, float]
    tensors: dict[str, Roles]
    state: AgentState = field(default_factory=AgentState)
    parent: int | None = None
    parent_generation: int | None = None
    mutation: Mutation = INITIAL
    fitness: float | None = None
    fault: str | None = None

    def child(self, id: int, generation: int | None = None) -> Agent:
        """Return a copy after a generation, with its own identity and tensors, and no fitness yet."""
        born = Mutation("none")
        copied = copy.deepcopy(self)
        return replace(copied, id=id, parent=self.id, parent_generation=generation, mutation=born, fitness=None)

    def describe(self) -> dict[str, Any]:
        """Return everything but the tensors, as JSON."""
        return {
            "id": self.id,
            "parent": self.parent,
            "parent_generation": self.parent_generation,
            "mutation": asdict(self.mutation),
            "fitness": self.fitness,
            "fault": self.fault,
            "architectures": {network: shape.to_json() for network, shape in self.architectures.items()},
            "hyperparameters": dict(self.hyperparameters),
            "state": asdict(self.state),
        }


@dataclass
class Transition:
    """One step of every environment; all tensors lead with [P, E].

    `started` says where `observation` begins an episode. `next_observation` is what the action led to, also at the end
    of an episode. `terminated` means that nothing follows it (do not bootstrap), `truncated` that the episode was cut
    there (do). Where `valid` is false the environment only reset itself and there is no transition; `all_valid` says
    that this happened nowhere, `any_truncated` that an episode was cut somewhere. `started` and `valid` stand on the
    CPU whatever the device, because they decide what is done.
    """

    observation: Observation
    started: Tensor
    reward: Tensor
    next_observation: Observation
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    all_valid: bool = True
    any_truncated: bool = False


@dataclass
class PolicyOutput:
    """The output of a policy in each environment: `action` [P, E, ...] for the environment, and `extras` [P, E, ...].

    Extras are whatever else the algorithm learns from, such as the log-probability. `state` and `next_state`
    [P, E, K, N] are the recurrent state before and after; they have no elements where no network is recurrent.
    """

    action: Tensor
    extras: Tensors
    state: Tensor
    next_state: Tensor


@dataclass
class RecurrentInput:
    """The input of recurrent networks beside observations. Axes: T time, S sequences, K numbers for each of N units.

    `state` [P, S, K, N] is the recurrent state before the first step, `started` [P, T, S] where episodes begin.
    """

    state: Tensor
    started: Tensor

    def part(self, members: slice | Tensor, units: int) -> RecurrentInput:
        """Return that of some of the agents, whose state has so many units."""
        return RecurrentInput(self.state[members][..., :units], self.started[members])


@dataclass
class Batch:
    """The input of one update of the population; everything leads with [P, B].

    A loss is the sum over B of `weight` times its elements, which makes it the mean over each agent's own batch
    whatever its size. Under prioritised replay `weight` includes importance weights and `share` [P, B] does not;
    metrics are means by `share`, or by `weight` where there is no `share`. Agents whose `due` [P] is 0 sit this update
    out; `all_due` says that none does. `columns` are actions, rewards, and whatever else was stored or computed of each
    transition.

    Sequences for recurrent agents stand time-major in B = T * S, with their `recurrent` input. A batch may bring flat
    `gradients`, by networks, which others have computed, with what they report [P, 1] for columns.

    `number` counts the batches that were drawn together, from 0.
    """

    observation: Observation
    next_observation: Observation
    columns: Tensors
    weight: Tensor
    due: Tensor
    recurrent: RecurrentInput | None = None
    all_due: bool = False
    gradients: Tensors = field(default_factory=dict)
    number: int = 0
    share: Tensor | None = None

    def part(self, members: slice | Tensor, units: int = 0) -> Batch:
        """Return the batch of some of the agents, whose recurrent state has so many units."""
        return Batch(
            {name: value[members] for name, value in self.observation.items()},
            {name: value[members] for name, value in self.next_observation.items()},
            {name: value[members] for name, value in self.columns.items()},
            self.weight[members],
            self.due[members],
            None if self.recurrent is None else self.recurrent.part(members, units),
            self.all_due,
            self.gradients,
            self.number,
            None if self.share is None else self.share[members],
        )


@dataclass
class Loss:
    """The loss of a stack of agents: `elements` [P, B], whose sum by the batch's weights is each agent's own.

    `metrics` gives numbers [P, B] for people, in those updates that report them, as means over the batch; `errors`
    [P, B] are for priorities. Where the mean, over ranks too, of the metric named `divergence`, such as that from the
    policy that gathered the batch, exceeds `limit` [P], an agent is not updated and learns no more from this
    experience.

    An algorithm that has worked its gradient out gives it in `gradients`: pairs of an output of the network [P, B, ...]
    and the gradient of the weighted sum by it. Without them autograd finds it from the elements.
    """

    elements: Tensor
    metrics: Callable[[], Tensors] = dict
    errors: Tensor | None = None
    divergence: str | None = None
    limit: Tensor | None = None
    gradients: Sequence[tuple[Tensor, Tensor]] = ()


@dataclass
class UpdateResult:
    """The result of an update: which agents were updated (`active` [P], 1 or 0), and their errors [P, B] if any.

    Without `active`, all of them were.
    """

    active: Tensor | None = None
    errors: Tensor | None = None


@dataclass
class UpdateMetrics:
    """The metrics of updates: how many there were of each agent [P], and sums over `counts` [P] of them by name."""

    updates: NDArray[np.float64]
    sums: dict[str, NDArray[np.float64]]
    counts: dict[str, NDArray[np.float64]]


@dataclass
class Segment:
    """A piece of experience in the order of time, from which targets are computed; all [T, P, E].

    `value` is that of the observation, `next_value` that of the next one. Where `valid` is false there is no
    transition.
    """

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
