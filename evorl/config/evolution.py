"""The `evolution` section: selection, mutation and schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from evorl.config.fields import (
    ENVIRONMENT,
    RETURN,
    Count,
    Finite,
    FitnessTerms,
    Fraction,
    HyperparameterRange,
    Positive,
    Section,
    Size,
    Text,
    Weight,
    Width,
)
from evorl.types import Architecture


def with_dotted_names(given: Any) -> Any:
    """Return ranges by dotted name, flattening environment ranges that are given as nested sections."""
    inner = given.get("environment") if isinstance(given, dict) else None
    kwargs = inner.get("kwargs") if isinstance(inner, dict) and len(inner) == 1 else None
    if not isinstance(kwargs, dict):
        return given
    others = {name: range for name, range in given.items() if name != "environment"}
    return others | {f"{ENVIRONMENT}{key}": range for key, range in kwargs.items()}


class Selection(Section):
    """The choice of agents that the next generation is made from."""

    name: Text = "tournament"
    """`none` keeps every agent as it is: a pool of agents that learn side by side."""
    size: Size = 2
    """Agents that meet in one tournament."""
    elitism: bool = True
    """For `tournament`: the best agent goes on unchanged. Under `truncation` it always does."""
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """For `truncation`: the share of the population that is replaced."""
    archive: Annotated[int, Field(ge=0, strict=True)] = 5
    """Generations for which the best agent so far goes on competing as a parent, on the episodes of each. For ever, it
    would keep a population from whatever gets worse before it gets better; with 0 it never returns."""


class Mutation(BaseModel):
    """The weight of each kind of mutation. Kinds added to the registry are weighted here by their names."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    __pydantic_extra__: dict[str, Weight]

    none: Weight = 0.4
    """The agent goes on as it is."""
    architecture: Weight = 0.2
    """Units, channels, kernels or layers are added or removed."""
    parameters: Weight = 0.2
    """Weights get noise."""
    activation: Weight = 0.0
    """The activation is another of `architecture.activations`."""
    hyperparameters: Weight = 0.2
    """A hyperparameter moves within its range."""
    new_layer: Fraction = 0.2
    """The share of architecture mutations that add or remove a layer rather than units."""
    strength: Positive = 0.02
    """Standard deviation of parameter noise, relative to each weight."""

    def weights(self) -> dict[str, float]:
        """Return the weight of each kind of mutation by name."""
        return {name: value for name, value in self if name not in ("new_layer", "strength")}

    @model_validator(mode="after")
    def _something_can_happen(self) -> Self:
        if sum(self.weights().values()) <= 0:
            raise ValueError("the weights sum to 0; at least one kind needs a positive weight")
        return self


class ArchitectureLimits(Section):
    """The limits of architecture mutations."""

    min_layers: Width = 1
    """The fewest hidden layers."""
    max_layers: Width = 3
    """The most hidden layers."""
    min_units: Width = 16
    """The fewest units of a layer or a recurrent cell."""
    max_units: Width = 256
    """The most units of a layer or a recurrent cell."""
    unit_steps: Annotated[tuple[Width, ...], Field(min_length=1)] = (16, 32)
    """The number of units that a mutation adds to a layer or a recurrent cell, or removes."""
    min_channels: Width = 8
    """The fewest channels of a convolution."""
    max_channels: Width = 128
    """The most channels of a convolution."""
    channel_steps: Annotated[tuple[Width, ...], Field(min_length=1)] = (8, 16)
    """The number of channels that a mutation adds to a convolution or removes."""
    activations: Annotated[tuple[Text, ...], Field(min_length=1)] = ("relu", "tanh", "elu", "gelu", "silu")
    """The activations that mutations choose from."""

    @model_validator(mode="after")
    def _are_ranges(self) -> Self:
        for what in ("layers", "units", "channels"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(f"min_{what} {low} must not exceed max_{what} {high}")
        return self


class ScheduledMutation(Section):
    """A mutation that is not drawn: its record as `lineage.jsonl` has it, and the generation after which it comes."""

    generation: Size
    """The generation after which it comes."""
    kind: Text
    """The kind of mutation."""
    target: Text = ""
    """What it changes."""
    before: int | Finite | Text | None = None
    """The value before it."""
    after: int | Finite | Text | None = None
    """The value after it."""


class Schedule(Section):
    """The course of one agent, which every agent of a run follows: its first settings, and then its mutations."""

    hyperparameters: dict[Text, Finite]
    """The first hyperparameters."""
    architectures: dict[Text, Architecture]
    """The first architecture of each network."""
    mutations: Annotated[tuple[ScheduledMutation, ...], Field(max_length=100_000)] = ()
    """The mutations, in their order."""


class Evolution(Section):
    """The length of a generation, and how the next one's agents are made from its own."""

    steps: Count = 10_000
    """Environment steps of each agent in a generation, over all ranks. A shipped file's number is for its own
    environment."""
    burn_in: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Generations before the first selection and mutation."""
    initial: Literal["configured", "sampled"] = "configured"
    """`sampled` draws each initial agent's hyperparameters evenly from their ranges, on their scales, and the sizes of
    its layers from the limits of `architecture` where mutations may change them."""
    selection: Selection = Selection()
    mutation: Mutation = Mutation()
    hyperparameters: Annotated[dict[str, HyperparameterRange] | None, BeforeValidator(with_dotted_names)] = None
    """Those that mutations perturb. Null stands for the algorithm's own ranges; `{}` are none. One may be a number in
    `environment.kwargs`, as `environment.kwargs.gravity`: each agent then trains in environments with its own value,
    and evaluation keeps the configured one."""
    architecture: ArchitectureLimits = ArchitectureLimits()
    fitness: FitnessTerms = Field(default={RETURN: 1.0})
    """What selection, the elite and `training.target_fitness` go by: the mean over evaluation episodes of `return`, of
    `info.KEY`, which is the number that the environment reports under KEY in an episode's last step, or of several
    with weights, as in `{return: 1, info.success: 100}`. Agents learn from rewards whatever it is."""
    schedule: Schedule | None = None
    """Agents follow it instead of being selected and mutated; `evorl retrain` takes it from a winner's ancestry."""

    def is_due(self, generation: int) -> bool:
        """Return whether selection and mutation follow a generation."""
        return generation > self.burn_in
