"""Data types shared by all packages. Axes: P agents, E environments, B batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

Words = Annotated[str, Field(max_length=1_000)]
Number = Annotated[int, Field(ge=0, le=10**15)]
Measured = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A number bounded so that reports can square and sum it without overflow."""


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
        return replace(self, before=before, after=after)

    def __str__(self) -> str:
        ends = [_shown(value) for value in (self.before, self.after) if value is not None]
        detail = ": ".join(part for part in (self.target, " -> ".join(ends)) if part)
        return f"{self.kind} ({detail})" if detail else self.kind


def _shown(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


INITIAL = Mutation("initial")
RESTORED = Mutation("none", "archive")
"""The mutation record of an archived elite restored to the population unchanged."""
UNCHANGED = ("initial", "none")
"""The kinds of records that change nothing."""
FINISHED, STOPPED = "finished", "stopped"
"""How a run that saved its last checkpoint ended: at its target or last step, or stopped by a callback."""


Shape = tuple[int, ...]
Flags = NDArray[np.bool_]
Tensors = dict[str, "Tensor"]
Roles = dict[str, Tensors]
"""The tensors of one network of one agent, by role."""
EXP_AVG, EXP_AVG_SQ = "mean", "square"
"""The roles of Adam's first and second moments, as checkpoints name them."""
ROLES = ("parameters", "buffers", "target", EXP_AVG, EXP_AVG_SQ)
"""Parameters and buffers (not trained); for each parameter its copy in the target network and Adam's moments."""


class UserError(Exception):
    """An error that the user can fix: programs print it as one line and exit with code 2.

    If all ranks raise it together, `reported_elsewhere` says whether another rank prints it. None means that only this
    rank knows of it.
    """

    def __init__(self, message: str, reported_elsewhere: bool | None = None) -> None:
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


def message_of(error: object, longest: int = 1_000) -> str:
    """The message of an exception on one line, cut after `longest` characters."""
    return " ".join(str(error).split())[:longest]


class RunFailed(RuntimeError):
    """A run failed without an error of the user: programs print it as one line and exit with code 1."""


class EvorlWarning(UserWarning):
    """A warning for the user; the run continues."""


Observation = Mapping[str, "Tensor"]
"""Observation parts [P, E, ...], with `action_mask` [P, E, A] where actions can be masked."""


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
    """A convolutional layer, padded with `padding` zeros at the bottom and right only.

    A kernel grows to the bottom right and its padding with it, so the output keeps its size. `residual_layers` 3x3
    layers follow, as in `Architecture`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    channels: Width
    kernel: Width
    stride: Width
    padding: Annotated[int, Field(ge=-1_000, le=1_000)] = 0
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
        """Width of each group of units and size of each kernel, by group: `hidden.0`, `kernel.0`, `recurrent`, ..."""
        sizes = {f"hidden.{index}": width for index, width in enumerate(self.hidden_sizes)}
        sizes |= {f"channels.{index}": layer.channels for index, layer in enumerate(self.convolutions)}
        sizes |= {f"kernel.{index}": layer.kernel for index, layer in enumerate(self.convolutions)}
        return sizes | ({"recurrent": self.recurrent_size} if self.recurrent else {})

    def resized(self, group: str, size: int) -> Architecture:
        """Give one group another size; a kernel keeps its output's size by padding."""
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

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON, with lists for tuples."""
        value: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return value


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
class Agent:
    """One member of the population, as a plain value between generations.

    `architectures` and `tensors` are those of each of its networks; tensors are by role, in their unpadded shapes.
    `parent` is the id of the agent it was copied from, `parent_generation` the generation after which that happened.
    `fault` says why it stopped learning before its generation ended. `ranks` are its fitness ranks in the last
    two generations, between 0 (worst) and 1 (best), with `burn_in: auto`; a new agent starts with its parent's.
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
    ranks: tuple[float, ...] = ()

    def child(self, id: int, generation: int | None = None) -> Agent:
        """Copy the agent after `generation`, with a new id, its own tensors and no fitness yet."""
        born = Mutation("none")
        copied = copy.deepcopy(self)
        return replace(copied, id=id, parent=self.id, parent_generation=generation, mutation=born, fitness=None)

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        return {
            "id": self.id,
            "parent": self.parent,
            "parent_generation": self.parent_generation,
            "mutation": asdict(self.mutation),
            "fitness": self.fitness,
            "fault": self.fault,
            **({"ranks": list(self.ranks)} if self.ranks else {}),
            "architectures": {network: shape.to_json() for network, shape in self.architectures.items()},
            "hyperparameters": dict(self.hyperparameters),
            "state": asdict(self.state),
        }


@dataclass
class Transition:
    """One step of every environment; all tensors lead with [P, E].

    `started` marks where `observation` begins an episode. `next_observation` is the result of the action, also at the
    end of an episode. `terminated` means do not bootstrap; `truncated` means that the episode was cut off: bootstrap.
    Where `valid` is false the environment was only reset and there is no transition; `all_valid` says that there is no
    such step, `any_truncated` that some episode was truncated. `started` and `valid` are on the CPU whatever the
    device, because control flow depends on them.
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
    """A policy's output in each environment: `action` [P, E, ...] for the environment, and `extras` [P, E, ...].

    Extras are other quantities the algorithm learns from, such as the log-probability. `state` and `next_state` [P, E,
    K, N] are the recurrent state before and after the step; they are empty if no network is recurrent.
    """

    action: Tensor
    extras: Tensors
    state: Tensor
    next_state: Tensor


@dataclass
class RecurrentInput:
    """Inputs of recurrent networks other than observations.

    Axes: T time, S sequences, I burn-in steps, K numbers for each of N units. `state` [P, S, K, N] is the recurrent
    state before the first step; `started` [P, T, S] marks the starts of episodes. Sequences from a replay have no
    state; they have the observations of the `burn_in` [P, I * S, ...] before them, and their `started` is
    [P, I + T, S].
    """

    state: Tensor
    started: Tensor
    burn_in: Observation = field(default_factory=dict)

    def part(self, members: slice | Tensor | int, units: int) -> RecurrentInput:
        """Select some of the agents, with `units` recurrent units."""
        burn_in = {name: value[members] for name, value in self.burn_in.items()}
        return RecurrentInput(self.state[members][..., :units], self.started[members], burn_in)


@dataclass
class Batch:
    """The input of one population update; all tensors lead with [P, B].

    The loss is the sum over B of `weight` times the loss per sample: the mean over each agent's own batch whatever its
    size. Under prioritised replay `weight` includes importance-sampling weights and `share` [P, B] does not; metrics
    are means by `share`, or by `weight` if there is no `share`. Agents with `due` [P] 0 skip this update; `all_due`
    says that none does. `columns` are actions, rewards, and anything else stored or computed per transition.
    Sequences for recurrent agents are time-major in B = T * S, with their `recurrent` input. A batch may instead carry
    flat `gradients` by network, computed by actors, with their metrics [P, 1] as columns.
    `number` is the batch's index among those that were drawn together.
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

    def unbound(self, all_due: Sequence[bool]) -> list[Batch]:
        """The batches of U updates, from one whose tensors lead with [U, P, B]; they are views."""
        units = 0 if self.recurrent is None else self.recurrent.state.shape[-1]
        batches = [self.part(update, units) for update in range(len(self.weight))]
        return [replace(batch, all_due=of_all) for batch, of_all in zip(batches, all_due, strict=True)]

    def part(self, members: slice | Tensor | int, units: int = 0) -> Batch:
        """Select some of the agents, with `units` recurrent units."""
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
    """The loss of a stack of agents: `per_sample` [P, B], whose weighted sum over B is each agent's loss.

    `metrics` returns metrics [P, B], in updates that report them, to be averaged over the batch; `errors` [P, B]
    (td_error) set priorities. If the mean, over ranks too, of the metric named `divergence`, such as the KL divergence
    from the behaviour policy, exceeds `limit` [P], the agent is not updated and stops learning from this experience.
    """

    per_sample: Tensor
    metrics: Callable[[], Tensors] = dict
    errors: Tensor | None = None
    divergence: str | None = None
    limit: Tensor | None = None


@dataclass
class UpdateResult:
    """The result of an update: which agents were updated (`active` [P], 1 or 0), and their errors [P, B] if any.

    `active` None means all of them.
    """

    active: Tensor | None = None
    errors: Tensor | None = None


@dataclass
class UpdateMetrics:
    """Metrics summed over updates: the number of updates [P], and per name the sum and the `counts` [P] it is over."""

    updates: NDArray[np.float64]
    sums: dict[str, NDArray[np.float64]]
    counts: dict[str, NDArray[np.float64]]


@dataclass
class Segment:
    """A rollout in time order, from which targets are computed; all [T, P, E].

    `value` is V(s) of the observation. `next_value` is that of the next observation, defined in the last row and where
    an episode is truncated. Where `valid` is false there is no transition.
    """

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
