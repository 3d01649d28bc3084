"""The sections of the configuration on the population and its evolution: selection, mutation, ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from evorl.config.fields import (
    RETURN,
    Count,
    FitnessTerms,
    Fraction,
    HyperparameterRange,
    Positive,
    Rate,
    Section,
    Size,
    Text,
    UserPath,
    Weight,
    Width,
)
from evorl.types.messages import shown

MOST_AGENTS = 1_000
"""The most agents of a run: all agents of a checkpoint share one header."""


class Selection(Section):
    """The selection of agents for the next generation."""

    name: Text = "tournament"
    """`tournament`, or `none`, which keeps every agent as it is: a pool that learns side by side, without mutation.
    `evolution=false` is short for it."""
    size: Size = 2
    """Agents that meet in one tournament."""
    replace: Rate = 0.25
    """The share of the population, the worst agents, that children replace; the others train on unchanged. With 1, all
    but the best are replaced."""


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{shown(value)} does not fit: it must be a number")
    return value


class Mutation(Section):
    """The weight of each kind of mutation. Kinds added to the registry are weighted here by their names."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Weight, BeforeValidator(_no_boolean)]]

    none: Weight = 0.4
    """The child is an exact copy of its parent."""
    architecture: Weight = 0.2
    """Units, channels or layers are added or removed."""
    parameters: Weight = 0.2
    """Noise is added to the weights."""
    activation: Weight = 0.0
    """The activation becomes another one."""
    hyperparameters: Weight = 0.2
    """A hyperparameter is perturbed or redrawn within its range."""
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

    max_layers: Width = 3
    """The most hidden layers."""
    min_units: Width = 16
    """The fewest units of a layer or a recurrent cell."""
    max_units: Width = 256
    """The most units of a layer or a recurrent cell."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_units > self.max_units:
            raise ValueError(f"min_units {self.min_units} must not exceed max_units {self.max_units}")
        return self


class Evolution(Section):
    """The length of a generation, and how the next one's agents are made from its own."""

    steps: Count = 10_000
    """Environment steps of each agent in a generation, over all ranks, rounded up to whole rollouts where an algorithm
    learns from them. A shipped file's number is for its own environment."""
    burn_in: Annotated[int, Field(ge=0, le=10**6)] | Literal["auto"] = "auto"
    """Generations that end without selection and mutation. With `auto`, selection begins after a third of
    `training.max_steps`, which grows if a run is resumed with more steps before then. With eight agents or more it
    begins earlier if their ranks in successive generations correlate by 0.7; the ranks of fewer do so by chance."""
    initial: Literal["configured", "sampled"] = "configured"
    """`sampled` draws each initial agent's hyperparameters evenly from their ranges, on their scales, and the sizes of
    its layers from the limits of `architecture` where mutations may change them."""
    selection: Selection = Selection()
    mutation: Mutation = Mutation()
    hyperparameters: dict[str, HyperparameterRange] | None = None
    """Ranges of the hyperparameters that mutations perturb. Null uses the algorithm's own ranges; otherwise only those
    that are named here are perturbed, `{}` means none. Null for one of them keeps it as it is: with
    `{learning_rate: null}` alone, evolution perturbs all others of the algorithm."""
    architecture: ArchitectureLimits = ArchitectureLimits()
    fitness: FitnessTerms = Field(default={RETURN: 1.0})
    """The quantity that selection, the elite and `training.target_fitness` use: the mean over evaluation episodes of
    `return`, of `info.KEY`, which is the number that the environment reports under KEY in an episode's last step, or of
    several with weights, as in `{return: 1, info.success: 100}`. Agents learn from rewards whatever it is. In a game,
    `rating` is the agents' Elo rating from the matches of the generation, and the elite is then the agent with the
    highest rating, without a confirmation; its score and target are its mean result (1 a win, 0.5 a draw) against
    `league.benchmark`."""


class PopulationSettings(Section):
    """The agents and where they train."""

    size: Annotated[int, Field(ge=1, le=MOST_AGENTS)] = 4
    """The number of agents. A single one trains on without selection and mutation, as in other
    libraries; its best state so far is kept as the elite."""
    islands: Annotated[int, Field(ge=1, le=500)] = 1
    """Independent populations of `size` agents each, which train side by side: selection and the replay stay
    within an island, and the capacity and `learning_starts` of the replay are those of each island."""
    control: bool = False
    """Give every island a twin that begins with the same agents and trains on without selection and mutation. At the
    end, evolution is compared with none over all islands, by an exact test. Such a run goes on to `training.max_steps`
    and does not test `training.target_fitness`."""
    placement: Literal["replicated", "sharded"] = "replicated"
    """`replicated`: every rank trains all agents and gradients are averaged. `sharded`: each trains its share alone."""
    from_: Annotated[UserPath | None, Field(alias="from")] = None
    """The directory of a run, or `hf:OWNER/NAME` on the Hugging Face Hub: all agents begin as copies of its elite, with
    its weights, optimisers and hyperparameters; null begins with new agents."""
    hyperparameters: tuple[Text, ...] = ()
    """With `from`: the names of hyperparameters that agents take from `algorithm` in place of their own. Those that the
    command line or `evorl.train` sets, as in `algorithm.learning_rate=1e-4`, are added."""

    @property
    def founders(self) -> int:
        """The number of agents that evolve, of all islands."""
        return self.size * self.islands

    @property
    def agents(self) -> int:
        """The number of all agents, twins included."""
        return self.founders * (1 + self.control)

    @property
    def places(self) -> list[slice]:
        """The places of each population's agents among all: of every island, then of every island's twin."""
        return [slice(first, first + self.size) for first in range(0, self.agents, self.size)]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.places) > 1 and self.size == 1:
            raise ValueError(
                "size: 1 leaves nothing to select in an island; use 2 or more, or leave islands and control out"
            )
        if self.agents > MOST_AGENTS:
            twins = ", with as many twins," if self.control else ""
            raise ValueError(
                f"islands: {self.islands} of {self.size} agents{twins} are more than {MOST_AGENTS:,} agents"
            )
        return self

    @model_serializer(mode="wrap")
    def _by_their_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"from" if name == "from_" else name: value for name, value in dump(self).items()}
