"""The configuration schema of an experiment, one class per section.

Every default is in this package or in an algorithm's settings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from evorl.config.errors import explain, nearest, shown
from evorl.config.fields import (
    DEFAULT_ALGORITHM,
    ENVIRONMENT,
    EXPONENT,
    RETURN,
    AlgorithmSettings,
    Count,
    Finite,
    FitnessTerms,
    Fraction,
    HyperparameterRange,
    Initialisation,
    Plain,
    Positive,
    Rate,
    Seconds,
    Section,
    Size,
    Text,
    UserPath,
    Weight,
    Width,
    as_configured,
    from_home,
    without_booleans,
)
from evorl.types import UserError

MAX_WEIGHTS = 2**28
"""Maximum weights between a network's initial layers; with its target and Adam's moments, 4 GiB for each agent."""


class ConvolutionalLayer(Section):
    """A convolution without padding, followed by the network's activation."""

    channels: Annotated[int, Field(ge=1, le=4096)]
    """The number of output channels."""
    kernel: Annotated[int, Field(ge=1, le=64)]
    """The width and height of its kernel."""
    stride: Annotated[int, Field(ge=1, le=64)] = 1
    """The stride of the convolution, in pixels."""


class Network(Section):
    """The networks of initial agents; if an algorithm has several, all start with these settings."""

    name: Text = "standard"
    """`standard`, which reads every observation, or `module` for a network of your own; see `factory`."""
    hidden_sizes: Annotated[tuple[Width, ...], Field(min_length=1, max_length=256)] = (64, 64)
    """The units of each hidden layer, in initial agents if mutations change them."""
    activation: Text = "relu"
    """The activation of hidden layers and convolutions: `relu`, `tanh`, `elu`, `gelu` or `silu`."""
    layer_norm: bool | None = None
    """Normalise hidden layers (arXiv 1607.06450). Null is the algorithm's default: true for DQN and Ape-X DQN, else
    false."""
    initialisation: Initialisation | None = None
    """Null is the algorithm's default: `orthogonal` where it learns from rollouts, `uniform` with a replay buffer."""
    convolutions: Annotated[tuple[ConvolutionalLayer, ...], Field(min_length=1, max_length=64)] = (
        ConvolutionalLayer(channels=32, kernel=8, stride=4),
        ConvolutionalLayer(channels=64, kernel=4, stride=2),
        ConvolutionalLayer(channels=64, kernel=3, stride=1),
    )
    """The convolutional layers of image encoders (Mnih et al. 2015)."""
    bf16: bool | None = None
    """Multiply in bfloat16 in hidden layers and convolutions; parameters and the optimiser stay in float32. Null
    follows Accelerate's `mixed_precision`. Do not use it with SAC, TD3 or DDPG where
    values are large: their rounding error exceeds the differences between actions (docs/results/tasks.md)."""
    recurrent: Text | None = None
    """A recurrent cell after the hidden layers: `lstm` or `gru`."""
    recurrent_size: Width = 64
    """The units of the recurrent cell."""
    factory: Plain | None = None
    """For `name: module`: `package.module:function`, called with (inputs, outputs), returns an `nn.Module`; `inputs` is
    the width of a vector or the shape of an image."""

    @model_validator(mode="after")
    def _factory_where_it_belongs(self) -> Self:
        if (self.name == "module") != (self.factory is not None):
            raise ValueError("`factory` and `name: module` go together")
        if self.name == "module" and self.recurrent:
            raise ValueError(f"a module has no recurrent state; leave `recurrent: {self.recurrent}` out")
        if self.name == "module" and self.initialisation:
            raise ValueError(f"a module initialises itself; leave `initialisation: {self.initialisation}` out")
        return self

    @model_validator(mode="after")
    def _fits_into_memory(self) -> Self:
        layers = pairwise(self.convolutions)
        weights = {
            "hidden_sizes": sum(before * after for before, after in pairwise(self.hidden_sizes)),
            "convolutions": sum(before.channels * after.channels * after.kernel**2 for before, after in layers),
        }
        for name, count in weights.items():
            if count > MAX_WEIGHTS:
                raise ValueError(f"{name} have {count} weights between them; they may have at most {MAX_WEIGHTS}")
        return self


class ImportanceExponent(Section):
    """The exponent of importance weights, which changes linearly from `start` to `end`."""

    start: Fraction = 0.4
    """Its initial value."""
    end: Fraction = 1.0
    """Its final value."""
    steps: Count | None = None
    """Environment steps of each agent, over all ranks, after which it is at its end; null is training.max_steps."""


class Prioritised(Section):
    """Proportional prioritised replay (arXiv 1511.05952), by default with the paper's exponents."""

    exponent: Fraction = 0.6
    """Priorities are (|error| + 1e-6) to this power; 0 samples uniformly."""
    importance_exponent: ImportanceExponent = ImportanceExponent()


class Replay(Section):
    """The replay buffer; algorithms that learn from rollouts have none."""

    capacity: Annotated[int, Field(ge=1, le=10**9)] = 100_000
    """Transitions kept, over all ranks and agents. Of stacked frames from actors fewer fit: each rollout also stores a
    row without a transition per frame of the stack."""
    learning_starts: Annotated[int, Field(ge=0, le=10**9)] = 1_000
    """Transitions held, over all ranks and agents, before learning starts."""
    n_step: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Steps of an n-step return (arXiv 1710.02298), without off-policy correction as there; SAC's omits the
    entropies of the steps between. Fewer if the episode ends, or if no more have been collected yet."""
    prioritised: Prioritised | None = None
    """Prioritised sampling; null samples all transitions uniformly."""
    shared: bool = True
    """Agents learn from each other's transitions, with `placement: sharded` only within a rank. If false, an agent
    learns only from its own transitions and its ancestors' (a child of another rank's agent, or of one that is gone,
    also from those collected before at its index in the population), and `capacity` is divided among the agents."""


class ActorSettings(Section):
    """Actor processes of each rank, each with `environment.num_envs` environments for every agent."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Actors of each rank."""
    queue: Annotated[int, Field(ge=1, le=256)] = 2
    """Rollout slots of an actor, for the one it is collecting and those that wait for the learner; it blocks if none is
    free."""
    fetch_steps: Count = 1
    """Steps of each environment after which an actor fetches the learner's parameters, at its next rollout; an actor
    of `a3c_shared` fetches them with each update that it makes."""
    lockstep: bool = False
    """For tests and debugging: actors take turns with the learner and each other, so that a run can be repeated."""


def with_dotted_names(ranges: Any) -> Any:
    """Return ranges by dotted name, flattening environment ranges that are given as nested sections."""
    inner = ranges.get("environment") if isinstance(ranges, dict) else None
    kwargs = inner.get("kwargs") if isinstance(inner, dict) and len(inner) == 1 else None
    if not isinstance(kwargs, dict):
        return ranges
    others = {name: range for name, range in ranges.items() if name != "environment"}
    return others | {f"{ENVIRONMENT}{key}": range for key, range in kwargs.items()}


class Selection(Section):
    """The selection of agents for the next generation."""

    name: Text = "tournament"
    """`tournament`, `truncation`, or `none`, which keeps every agent as it is: a pool that learns side by side."""
    size: Size = 2
    """Agents that meet in one tournament."""
    replace: Rate = 0.25
    """The share of the population, the worst agents, that children replace; the others train on unchanged. With 1 a
    tournament replaces all but the elite; `truncation` replaces half at most."""
    archive: Annotated[int, Field(ge=0, strict=True)] = 5
    """Generations for which the elite still competes as a parent, evaluated on the episodes of each; 0 is none. If it
    competed for ever, a population could never pass through a phase of lower returns to reach higher ones."""


class Mutation(Section):
    """The weight of each kind of mutation. Kinds added to the registry are weighted here by their names."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Weight, BeforeValidator(without_booleans)]]

    none: Weight = 0.4
    """The child is an exact copy of its parent."""
    architecture: Weight = 0.2
    """Units, channels, kernels or layers are added or removed."""
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
    """Environment steps of each agent in a generation, over all ranks. A shipped file's number is for its own
    environment."""
    burn_in: Annotated[int, Field(ge=0, le=10**6)] | Literal["auto"] = "auto"
    """Generations that end without selection and mutation. With `auto`, selection begins after a third of
    `training.max_steps`, which grows if a run is resumed with more steps before then. With eight agents or more it
    begins earlier if their ranks in successive generations correlate by 0.7; the ranks of fewer do so by chance."""
    initial: Literal["configured", "sampled"] = "configured"
    """`sampled` draws each initial agent's hyperparameters evenly from their ranges, on their scales, and the sizes of
    its layers from the limits of `architecture` where mutations may change them."""
    selection: Selection = Selection()
    mutation: Mutation = Mutation()
    hyperparameters: Annotated[dict[str, HyperparameterRange] | None, BeforeValidator(with_dotted_names)] = None
    """Ranges of the hyperparameters that mutations perturb. Null uses the algorithm's own ranges; otherwise only those
    that are named here are perturbed, `{}` means none. One may be a number in `environment.kwargs`, as
    `environment.kwargs.gravity`: each agent then trains in environments with its own value, and evaluation keeps the
    configured one."""
    architecture: ArchitectureLimits = ArchitectureLimits()
    fitness: FitnessTerms = Field(default={RETURN: 1.0})
    """The quantity that selection, the elite and `training.target_fitness` use: the mean over evaluation episodes of
    `return`, of `info.KEY`, which is the number that the environment reports under KEY in an episode's last step, or of
    several with weights, as in `{return: 1, info.success: 100}`. Agents learn from rewards whatever it is. In a game,
    `rating` is the agents' Elo rating from the matches of the generation, and the elite is then the agent with the
    highest rating, without a confirmation; its score and target are its mean result (1 a win, 0.5 a draw) against
    `league.benchmark`."""


MAX_COPIES = 2**16


class RunSettings(Section):
    """The run's directory, and how its processes compute and wait."""

    name: Text | None = None
    """The run's directory below `directory`; without it each run gets a fresh one."""
    directory: UserPath = Path("runs")
    """The folder of runs."""
    resume: Literal["never", "auto"] = "never"
    """`auto` resumes from the newest intact checkpoint, if there is one."""
    timeout: Seconds = 300.0
    """Seconds that a rank waits for the others before it gives up."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads of each rank; an actor has one. Null is OMP_NUM_THREADS if that is set, else 1 or, if agents see
    images, an equal share of the machine's cores."""
    kernel: Literal["auto", False] = "auto"
    """On a CPU, compute hidden layers, heads and optimiser steps by C++ that the machine's compiler builds on first use
    (some seconds; kept in ~/.cache/evorl). False, or a machine without a C++ compiler: by torch."""
    verbose: bool = False
    """At the start, print also the spaces, the sizes of updates and generations, and whether resuming is exact."""

    @field_validator("name", "directory")
    @classmethod
    def _is_a_path(cls, value: str | Path | None) -> str | Path | None:
        if not str(value).isprintable() or any(len(os.fsencode(part)) > 255 for part in Path(str(value)).parts):
            raise ValueError("it must be a path of printable characters, at most 255 bytes between slashes")
        return value

    @field_validator("name")
    @classmethod
    def _stays_below(cls, value: str | None) -> str | None:
        if value is not None and (not Path(value).parts or ".." in Path(value).parts or Path(value).is_absolute()):
            raise ValueError(f"{shown(value)} would not lie below run.directory; use a plain name")
        return value


class Environment(Section):
    """The environment that agents are trained in, and how it is stepped and seen."""

    id: Plain = "LunarLander-v3"
    """A name that Gymnasium knows, or `package.module:NAME`, a name, class or function of a module of your own."""
    num_envs: Size = 8
    """Copies for each agent on each process that steps environments: a rank, or an actor."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment. They count as the same task, so the file's target still applies."""
    vectorization: Literal["auto", "native", "sync", "async"] = "auto"
    """`auto` takes the environment's own vector implementation where it has one, else `sync`."""
    observation_indices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """The indices of the entries of a vector observation that agents see; null: all."""
    life_loss_ends: bool = False
    """Atari: training episodes end with each life. Returns and evaluation count whole games. After a lost life FIRE
    is pressed, as it is in resets, where the game's actions include it."""
    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Restarts of each copy after it raised an error; the episode it was in is dropped."""
    carry_over: Literal["auto"] | bool = "auto"
    """Continue episodes from one generation to the next; a resumed run replays them, except those of actors. `auto`
    does so unless a generation has twice as many steps of each environment as the longest episode that the environment
    allows, or `actors.lockstep` is set."""


class PopulationSettings(Section):
    """The agents and where they train."""

    size: Annotated[int, Field(ge=1, le=10_000)] = 4  # A generation's metrics are one line, of 16 MiB at most.
    """The number of agents. A single one trains on without selection and mutation, as in other libraries; its best
    state so far is kept as the elite."""
    placement: Literal["replicated", "sharded"] = "replicated"
    """`replicated`: every rank trains all agents and gradients are averaged. `sharded`: each trains its share alone."""
    from_: Annotated[UserPath | None, Field(alias="from")] = None
    """The directory of a run, or `hf:OWNER/NAME` on the Hugging Face Hub, whose agents are the first ones, with their
    weights, optimisers and hyperparameters; null begins with new agents."""
    from_agents: Literal["elite", "population"] = "elite"
    """With `from`: all agents begin as copies of its elite, or as the agents of its newest checkpoint."""

    @model_serializer(mode="wrap")
    def _by_their_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"from" if name == "from_" else name: value for name, value in dump(self).items()}


class Evaluation(Section):
    """The evaluation of agents, in episodes without exploration."""

    fitness: Literal["evaluation", "training"] = "evaluation"
    """`training`: an agent's fitness is the mean return of its training episodes, with exploration, and only the best
    agent and the elite are evaluated. In a generation in which an agent has fewer than `episodes` of them, all agents
    are evaluated. Not in games."""
    episodes: Size = 10
    """Episodes that make an agent's fitness, over all ranks; the same ones for all agents of a generation."""
    max_steps: Count | None = None
    """Truncate evaluation episodes after this many steps, and matches after this many moves of both seats together;
    without it the environment decides."""
    confirmation_episodes: Annotated[int, Field(ge=0, le=2**20)] = 60
    """The maximum number of fresh episodes in which the best agent of a generation challenges the elite, since the best
    of several noisy means is biased upwards. The winner's score is the mean over separate episodes, `episodes` more in
    each generation until there are as many. The test of the target may use eight times this number in a generation, or,
    with more than four agents, twice this number for each agent. 0 decides and scores by the generation's
    `episodes`, so scores are biased upwards."""

    @model_validator(mode="after")
    def _confirms_by_more(self) -> Self:
        if 0 < self.confirmation_episodes < self.episodes:
            raise ValueError(
                f"confirmation_episodes: {self.confirmation_episodes} are fewer than the {self.episodes} of `episodes` "
                f"that they are to confirm; use at least {self.episodes}, or 0 for none"
            )
        return self


class LeagueSettings(Section):
    """Matchmaking and archive of the league in a two-player game; other environments have none."""

    matchmaking: Text = "pfsp"
    """The choice of an opponent for each environment and generation: `pfsp` prefers those that the agent loses to
    (prioritised fictitious self-play, Vinyals et al. 2019), `uniform` takes all alike, from the population and the
    archive; `population` takes the population alone, and `latest` the agent itself. All are as they were when the
    generation began."""
    learn_from: Literal["own", "both"] = "own"
    """`own`: the agent plays one seat of each environment and learns from that seat's turns. `both`: with `latest`, it
    plays both seats and learns from the turns of both, which doubles the experience of a game. The value of the next
    turn is then the other seat's and counts negatively, so this requires zero-sum games in which seats move in turn,
    perfect information and feed-forward networks; and a `train_return` adds what each seat gained by its own moves."""
    archive: Annotated[int, Field(ge=0, le=1_024)] = 8
    """The maximum number of frozen past agents. The first always stays, since its rating defines 0; if the archive is
    full, the lowest rated of the others leaves. With 1, each newly archived agent replaces the one before; fitness by
    rating requires 2 or more."""
    margin: Annotated[float, Field(ge=-0.5, le=0.5)] = 0.05
    """A generation's best agent is archived if its mean result against the archive, from 0 to 1, is above a half by
    this much. With -0.5 every generation's best agent is archived, as fictitious play needs: there the average of all
    past agents matters, and the newest may well lose to some."""
    benchmark: Annotated[Plain, AfterValidator(from_home)] = "random"
    """The opponent in evaluation episodes; with `evolution.fitness: rating` the elite's score and the target are mean
    results against it. `random`; the directory of a run, whose best agent samples its moves; or
    `package.module:player`, a function that takes an observation and its action mask (or None) and returns a move.
    Such a function should be deterministic, or runs cannot be repeated. A run's agent is read when training begins or
    resumes; a resumed run warns if it has changed since. `evorl evaluate` uses the same opponent."""
    games: Annotated[int, Field(ge=2, le=10_000, multiple_of=2)] = 8
    """Games of each pair of agents in a generation's evaluation, on the same seeds for all pairs, half from either
    seat. Agents act in them as in training, not greedily."""


class Training(Section):
    """The length of a run, and when it ends early."""

    max_steps: Count = 1_000_000
    """Environment steps of each agent, over all ranks. The last generation has as many as are left, in whole rollouts;
    less than a tenth of a generation is left untrained. A shipped file's number is for its own environment."""
    target_fitness: Finite | None = None
    """The mean fitness at which the run ends, once the elite's is above it with 95 % confidence, over the whole run and
    for every distribution of returns that are not below the worst return of the run, or 0 if that is lower; with
    `evaluation.confirmation_episodes: 0`, once a mean is above it. Null sets none. The
    target in a file is for its own environment; in another one it is the reward threshold that Gymnasium has there.
    With `evolution.fitness: rating` it is a mean result, above 0 and below 1."""


class Tracking(Section):
    """Experiment trackers, which record a run in addition to its own files."""

    backends: tuple[Text, ...] = ("wandb",)
    """`wandb`, `tensorboard` and `trackio`: any of them, or none."""
    project: Text = "evorl"
    """W&B and Trackio: the project that the run is in. W&B's entity, group, job type, notes and tags are what its own
    variables say: WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_JOB_TYPE, WANDB_NOTES and WANDB_TAGS. It is online if there is a
    key, unless WANDB_MODE says otherwise."""
    video: bool = False
    """Film an episode of each new best agent, up to 5,000 steps of it: `videos/` in the run's directory, and W&B shows
    it. Needs the extra `video`."""
    exclude: tuple[Text, ...] = ()
    """Settings that are not sent to trackers, by their paths, such as `environment.kwargs` or
    `environment.kwargs.token`; all others are sent. Those that agents carry, such as `algorithm.learning_rate` and
    `network.hidden_sizes`, cannot be left out."""

    @field_validator("backends", mode="before")
    @classmethod
    def _none_is_an_empty_list(cls, value: Any) -> Any:
        if value in ("none", None, False):
            raise ValueError(f"{shown(value)} does not fit: it must be a list, and [] is none")
        return value


class Checkpoint(Section):
    """The checkpoints that a run can be resumed from."""

    keep: Size = 2
    """The number of newest checkpoints that stay; that of the generation with the best agent stays too."""
    minutes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Also save within a generation, at this interval; null saves there only when a signal ends the run. Not with
    actors."""


Settings = TypeVar("Settings", bound=AlgorithmSettings)


class Config(Section, Generic[Settings]):
    """A whole experiment."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """The random seed."""
    run: RunSettings = RunSettings()
    environment: Environment = Environment()
    algorithm: Settings
    """The algorithm, and the settings that it has for itself."""
    network: Network = Network()
    actors: ActorSettings | None = None
    """The actors of asynchronous algorithms; other algorithms collect in the learner's own process."""
    replay: Replay = Replay()
    population: PopulationSettings = PopulationSettings()
    evolution: Evolution = Evolution()
    evaluation: Evaluation = Evaluation()
    league: LeagueSettings | None = None
    """The league of a two-player game; null means its defaults."""
    training: Training = Training()
    tracking: Tracking = Tracking()
    checkpoint: Checkpoint = Checkpoint()

    def resolved(self) -> Self:
        """Return the effective configuration: null and `auto` replaced by the values that other settings imply.

        Values that depend on the machine and the launch are filled in by `evorl.runs.launch.launched`.
        """
        algorithm, network, configured = self.algorithm, self.network, self.evolution.hyperparameters
        if network.name != "module":
            defaults = {"initialisation": algorithm.initialisation, "layer_norm": algorithm.layer_norm}
            unset = {key: value for key, value in defaults.items() if getattr(network, key) is None}
            network = network.model_copy(update=unset)
        actors = self.actors or ActorSettings() if algorithm.actor_messages is not None else None
        ranges = algorithm.default_ranges() if configured is None else algorithm.scaled(configured)
        evolution = self.evolution.model_copy(update={"hyperparameters": ranges})
        environment = self.environment
        # Native vector environments share one set of settings between all copies.
        if environment.vectorization == "auto" and any(name.startswith(ENVIRONMENT) for name in ranges):
            environment = environment.model_copy(update={"vectorization": "sync"})
        update = {"network": network, "actors": actors, "evolution": evolution, "environment": environment}
        return self.model_copy(update=update)

    @field_validator("actors")
    @classmethod
    def _are_where_they_act(cls, actors: ActorSettings | None, info: ValidationInfo) -> ActorSettings | None:
        algorithm: AlgorithmSettings | None = info.data.get("algorithm")
        if actors is not None and algorithm is not None and algorithm.actor_messages is None:
            raise ValueError(f"{algorithm.name} collects in the learner's own process, without actors; leave them out")
        return actors

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_population()
        self._check_replay()
        environments = self.first_environment_hyperparameters()
        if self.evaluation.fitness == "training":
            self._check_training_fitness(environments)
        for name, ends in (self.resolved().evolution.hyperparameters or {}).items():
            self._check_hyperparameter(name, ends, environments)
        return self

    def _check_population(self) -> None:
        """Raise ValueError if selection, checkpoints or environments do not suit the population."""
        selection, size = self.evolution.selection, self.population.size
        if selection.name == "tournament" and selection.size > size > 1:
            raise ValueError(
                f"evolution.selection.size: a tournament of {selection.size} needs at least as many agents, "
                f"but population.size is {size}; use evolution.selection.size={size}"
            )
        if self.algorithm.actor_messages is not None and self.checkpoint.minutes is not None:
            raise ValueError(
                f"checkpoint.minutes: {self.algorithm.name} learns from actors, whose state within a generation cannot "
                "be saved; leave it out"
            )
        if size * self.environment.num_envs > MAX_COPIES:
            raise ValueError(
                f"environment.num_envs: {self.environment.num_envs} for each of {size} agents make more than "
                f"{MAX_COPIES} environments"
            )

    def _check_replay(self) -> None:
        """Raise ValueError if learning could never start, or nothing is replayed."""
        if self.replay.learning_starts > self.replay.capacity:
            raise ValueError(
                f"replay.learning_starts: {self.replay.learning_starts} transitions never fit into "
                f"replay.capacity {self.replay.capacity}"
            )
        if not self.algorithm.replayed and self.replay != (plain := Replay()):
            name = next(name for name, value in self.replay if value != getattr(plain, name))
            raise ValueError(f"replay.{name}: {self.algorithm.name} learns from rollouts; leave it out")

    def _check_hyperparameter(self, name: str, ends: HyperparameterRange, environments: Collection[str]) -> None:
        """Raise ValueError if evolution cannot perturb a setting between these ends, or that would have no effect."""
        if name in environments:
            if reason := ends.validation_error():
                raise ValueError(f"evolution.hyperparameters.{name}: {reason}")
            return
        if name not in self.algorithm.hyperparameters:
            raise ValueError(
                f"evolution.hyperparameters.{name}: {self.algorithm.name} has no hyperparameter of this name"
                + nearest(name, self.algorithm.hyperparameters)
            )
        if getattr(self.algorithm, name) is None:
            raise ValueError(
                f"algorithm.{name}: is null, and evolution perturbs only numbers; set it, or drop its range"
            )
        if reason := self.algorithm.ineffective(name):
            raise ValueError(f"evolution.hyperparameters.{name}: has no effect, {reason}; drop its range")
        for end, value in (("min", ends.min), ("max", ends.max)):
            if reason := self.algorithm.validation_error(name, value):
                raise ValueError(f"evolution.hyperparameters.{name}.{end}: {reason}")
        if reason := ends.validation_error():
            raise ValueError(f"evolution.hyperparameters.{name}: {reason}")

    def _check_training_fitness(self, environments: Collection[str]) -> None:
        """Raise ValueError if training episodes cannot measure an agent's fitness."""
        if self.evolution.fitness != {RETURN: 1.0}:
            terms = " + ".join(f"{name} x {weight:g}" for name, weight in self.evolution.fitness.items())
            raise ValueError(
                f"evaluation.fitness: training counts only returns, and evolution.fitness is {terms}; use evaluation, "
                "or evolution.fitness=return"
            )
        if environments:
            raise ValueError(
                f"evaluation.fitness: with {next(iter(environments))} in evolution.hyperparameters agents train in "
                "different environments, so their training returns cannot be compared; use evaluation"
            )

    def first_environment_hyperparameters(self) -> dict[str, float]:
        """Return the configured values of hyperparameters that are environment settings.

        Raises ValueError if one is not configured as a number, or cannot differ between environment copies.
        """
        first = {}
        for name in self.evolution.hyperparameters or {}:
            if name.startswith(ENVIRONMENT):
                value = self.environment.kwargs.get(name.removeprefix(ENVIRONMENT))
                if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(
                        f"evolution.hyperparameters.{name}: {name} is {shown(value)}; give it as a number: evaluation "
                        "keeps it, and mutations begin there"
                    )
                first[name] = float(value)
        if first and self.environment.vectorization == "native":
            raise ValueError(
                "environment.vectorization: native copies are all alike, and "
                f"evolution.hyperparameters has {next(iter(first))}; use sync or async"
            )
        return first

    def effective_value(self, name: str, value: float) -> float:
        """Return a hyperparameter's value as used in training, the form in which it is displayed."""
        if not math.isfinite(value):
            return value
        if name.startswith(ENVIRONMENT):
            return as_configured(value, self.environment.kwargs.get(name.removeprefix(ENVIRONMENT)))
        recurrent = self.network.recurrent is not None
        return self.algorithm.effective_value(name, value, self.environment.num_envs, recurrent=recurrent)

    def to_yaml(self) -> str:
        """Return the whole configuration as YAML, including defaults; it reproduces the run."""
        return as_yaml(self.model_dump(mode="json"))


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes texts such as 1e-3, which configurations have for numbers and YAML 1.1 does not."""


_Dumper.add_implicit_resolver(*EXPONENT)


def as_yaml(settings: Any, **format: Any) -> str:
    """Format settings as YAML that is read back as the same settings; PyYAML's options are in `format`."""
    return str(yaml.dump(settings, Dumper=_Dumper, sort_keys=False, **format))


# The models of algorithms inherit the descriptions of Config's fields. Each would otherwise look for its source in
# every frame of the stack, and for the module of each frame among all that are imported.
Config.model_config["use_attribute_docstrings"] = False
AnyConfig = Config[Any]


def model_of(settings: type[AlgorithmSettings]) -> type[AnyConfig]:
    """Return the configuration model for an algorithm with these settings."""
    return Config[settings]  # type: ignore[valid-type]


def validate(data: Mapping[str, Any], algorithms: Mapping[str, type[AlgorithmSettings]]) -> AnyConfig:
    """Validate `data` and return the effective configuration; `algorithms` maps names to algorithm settings.

    Raises UserError with the path of each invalid key and what would be valid.
    """
    section = data.get("algorithm", {})
    name = section.get("name", DEFAULT_ALGORITHM) if isinstance(section, dict) else DEFAULT_ALGORITHM
    if not isinstance(name, str) or name not in algorithms:
        raise UserError(f"algorithm.name: there is no algorithm {shown(name)}" + nearest(str(name), algorithms))
    model = model_of(algorithms[name])
    try:
        return model.model_validate({"algorithm": {"name": name}, **data}).resolved()
    except ValidationError as error:
        raise UserError(explain(model, error)) from None  # Its text is for programmers.


def check_name(key: str, name: str, registry: Mapping[str, Any]) -> None:
    """Raise UserError unless `name`, the value of `key`, is registered."""
    if name not in registry:
        raise UserError(f"{key}: there is no {shown(name)}" + nearest(name, registry))
