"""The YAML schema of an experiment. Every default of the project stands here or in an algorithm's own settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evorl.explain import explain, nearest
from evorl.types import UserError

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the configuration: immutable, and without room for a key it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AlgorithmSettings(Section):
    """What every algorithm's settings have; the rest stands in the algorithm's file."""

    name: str = "dqn"
    reward_clip: Positive | None = None
    """Agents learn from rewards cut to this much on either side of zero; fitness and returns count the true ones."""

    hyperparameters: ClassVar[tuple[str, ...]] = ()
    """The settings that differ between agents and that evolution may turn."""


class Run(Section):
    name: str | None = None
    """The run's directory below `directory`; without it each run gets a fresh one."""
    directory: Path = Path("runs")
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on from the newest checkpoint that is whole, where there is one."""
    timeout: Positive = 300.0
    """Seconds that a rank waits for the others before it gives up."""


class Environment(Section):
    id: str = "LunarLander-v3"
    num_envs: Count = 8
    """Copies for each agent on each process."""
    kwargs: dict[str, Any] = {}
    vectorization: Literal["auto", "native", "sync", "async"] = "auto"
    """`auto` takes the environment's own vector implementation where it has one, else `sync`."""
    visible: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """The numbers of a vector observation that agents see, by their positions; without it all."""
    life_loss_ends: bool = False
    """Atari: what is learned from ends with each life. Returns and evaluation count whole games."""
    carry_over: bool = False
    """Let episodes run on over a generation's end. A resumed run is then not bit-identical."""


class ConvolutionalLayer(Section):
    """A convolution without bounds on the image, followed by the network's activation."""

    channels: Annotated[int, Field(ge=1, le=4096)]
    kernel: Annotated[int, Field(ge=1, le=64)]
    stride: Annotated[int, Field(ge=1, le=64)] = 1


class Network(Section):
    name: str = "standard"
    hidden_sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=65536)], ...], Field(min_length=1)] = (64, 64)
    activation: str = "relu"
    layer_norm: bool = False
    convolutions: Annotated[tuple[ConvolutionalLayer, ...], Field(min_length=1)] = (
        ConvolutionalLayer(channels=32, kernel=8, stride=4),
        ConvolutionalLayer(channels=64, kernel=4, stride=2),
        ConvolutionalLayer(channels=64, kernel=3, stride=1),
    )
    """What reads images, where the environment shows any (Mnih et al. 2015)."""
    recurrent: str | None = None
    """A memory after the hidden layers: `lstm` or `gru`."""
    recurrent_size: Annotated[int, Field(ge=1, le=65536)] = 64
    factory: str | None = None
    """For `name: module`: `package.module:function`, called with (inputs, outputs), returns an `nn.Module`; `inputs` is
    the width of a vector or the shape of an image."""

    @model_validator(mode="after")
    def _factory_where_it_belongs(self) -> Self:
        if (self.name == "module") != (self.factory is not None):
            raise ValueError("`factory` and `name: module` go together")
        return self


class Replay(Section):
    capacity: Count = 100_000
    """Transitions kept, over all ranks and agents."""
    learning_starts: Annotated[int, Field(ge=0)] = 1_000
    """Transitions held, over all ranks and agents, before learning starts."""


class PopulationSettings(Section):
    size: Count = 4
    placement: Literal["replicated", "sharded"] = "replicated"
    """`replicated`: every rank trains all agents and gradients are averaged. `sharded`: each trains its share alone."""


class Selection(Section):
    name: str = "tournament"
    size: Count = 2
    """Agents that meet in one tournament."""
    elitism: bool = True
    """For `tournament`: the best agent goes on unchanged. Under `truncation` it always does."""
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """For `truncation`: the share of the population that is replaced."""


class Mutation(BaseModel):
    """The weight of each kind of mutation. Kinds added to the registry are weighted here by their names."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Weight]

    none: Weight = 0.4
    architecture: Weight = 0.2
    parameters: Weight = 0.2
    activation: Weight = 0.0
    hyperparameters: Weight = 0.2
    new_layer: Fraction = 0.2
    """The share of architecture mutations that add or remove a layer rather than units."""
    strength: Positive = 0.1
    """Standard deviation of parameter noise, relative to each weight."""

    def weights(self) -> dict[str, float]:
        """The weight of each kind by its name."""
        return {name: value for name, value in self if name not in ("new_layer", "strength")}

    @model_validator(mode="after")
    def _something_can_happen(self) -> Self:
        if sum(self.weights().values()) <= 0:
            raise ValueError("the weights sum to 0; at least one kind needs a positive weight")
        return self


class HyperparameterRange(Section):
    """How evolution may turn one hyperparameter. The range bounds what a mutation may choose, not the first value."""

    min: Annotated[float, Field(allow_inf_nan=False)]
    max: Annotated[float, Field(allow_inf_nan=False)]
    scale: Literal["log", "linear"] = "log"
    """`log` multiplies by `grow` or `shrink`; `linear` moves by (factor - 1) of the range."""
    grow: Annotated[float, Field(gt=1)] = 1.2
    shrink: Annotated[float, Field(gt=0, lt=1)] = 0.8

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if not self.min < self.max:
            raise ValueError(f"min {self.min:g} must be below max {self.max:g}")
        if self.scale == "log" and self.min <= 0:
            raise ValueError(f"min {self.min:g} must be above 0 on a log scale")
        return self


class ArchitectureLimits(Section):
    """How far architecture mutations may go."""

    min_layers: Count = 1
    max_layers: Count = 3
    min_units: Count = 16
    max_units: Count = 256
    unit_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (16, 32)
    """How many units a mutation adds to a layer or a memory, or removes."""
    min_channels: Count = 8
    max_channels: Count = 128
    channel_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (8, 16)
    """How many channels a mutation adds to a convolution or removes."""
    max_convolutions: Count = 6
    """The most convolutional layers that mutations may come to."""
    max_kernel: Count = 9
    """Mutations let kernels grow to this and shrink to 1."""
    activations: Annotated[tuple[str, ...], Field(min_length=1)] = ("relu", "tanh", "elu", "gelu", "silu")

    @model_validator(mode="after")
    def _are_ranges(self) -> Self:
        for what in ("layers", "units", "channels"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(f"min_{what} {low} must not exceed max_{what} {high}")
        return self


class Evolution(Section):
    steps: Count = 10_000
    """Environment steps of each agent in a generation, over all ranks."""
    selection: Selection = Selection()
    mutation: Mutation = Mutation()
    hyperparameters: dict[str, HyperparameterRange] = {}
    architecture: ArchitectureLimits = ArchitectureLimits()


class Evaluation(Section):
    episodes: Count = 10
    """Episodes that make an agent's fitness, over all ranks."""
    max_steps: Count | None = None
    """Cut evaluation episodes after so many steps; without it the environment decides."""
    confirmation_episodes: Annotated[int, Field(ge=0)] = 0
    """Fresh episodes on which the best agent must reach the target again, since the best of noisy means is too high."""


class Training(Section):
    max_steps: Count = 1_000_000
    """Environment steps of each agent, over all ranks, after which no further generation begins."""
    target_fitness: float | None = None


class Tracking(Section):
    backends: tuple[str, ...] = ("wandb",)
    project: str = "evorl"
    entity: str | None = None
    mode: Literal["auto", "online", "offline"] = "auto"
    """W&B: `auto` is online where there is a key, else offline."""
    tags: tuple[str, ...] = ()


class Checkpoint(Section):
    keep: Count = 2
    """How many of the newest checkpoints stay."""


Settings = TypeVar("Settings", bound=AlgorithmSettings)


class Config(Section, Generic[Settings]):
    """A whole experiment."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    run: Run = Run()
    environment: Environment = Environment()
    algorithm: Settings
    network: Network = Network()
    replay: Replay = Replay()
    population: PopulationSettings = PopulationSettings()
    evolution: Evolution = Evolution()
    evaluation: Evaluation = Evaluation()
    training: Training = Training()
    tracking: Tracking = Tracking()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        selection, size = self.evolution.selection, self.population.size
        if selection.name == "tournament" and selection.size > size:
            raise ValueError(
                f"evolution.selection.size: a tournament of {selection.size} needs at least as many agents, "
                f"but population.size is {size}"
            )
        if self.replay.learning_starts > self.replay.capacity:
            raise ValueError(
                f"replay.learning_starts: {self.replay.learning_starts} transitions never fit into "
                f"replay.capacity {self.replay.capacity}"
            )
        for name in self.evolution.hyperparameters:
            if name not in self.algorithm.hyperparameters:
                raise ValueError(
                    f"evolution.hyperparameters.{name}: {self.algorithm.name} has no hyperparameter of this name"
                    + nearest(name, self.algorithm.hyperparameters)
                )
            if getattr(self.algorithm, name) is None:
                raise ValueError(f"algorithm.{name}: evolution can only turn it from a number, and it is null")
            self._check_ends(name)
        return self

    def _check_ends(self, name: str) -> None:
        """Raise ValueError unless the setting may take both ends of its range; whole numbers are rounded."""
        settings, ends = self.algorithm, self.evolution.hyperparameters[name]
        for end, value in (("min", ends.min), ("max", ends.max)):
            whole = isinstance(getattr(settings, name), int) and type(settings).model_fields[name].annotation is int
            changed = settings.model_dump() | {name: round(value) if whole else value}
            try:
                type(settings).model_validate(changed)
            except ValidationError as error:
                reason = explain(type(settings), error)
                raise ValueError(f"evolution.hyperparameters.{name}.{end}: {reason}") from error

    def to_yaml(self) -> str:
        """The whole configuration, defaults included; it reproduces the run."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


AnyConfig = Config[Any]


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-3 as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError where there is none."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot read the configuration: {reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: the configuration must be a mapping of sections, not a {type(data).__name__}")
    return data


def override(data: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`data` with `key.path=value` assignments applied; values are read as YAML. Raises UserError."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            raise UserError(f"{assignment!r}: an override has the form key.path=value")
        try:
            value = yaml.load(text, Loader=_Loader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: {text!r} is not valid YAML") from error
        data = _with_value(data, keys, value, path)
    return data


def _with_value(data: Any, keys: list[str], value: Any, path: str) -> dict[str, Any]:
    if data is not None and not isinstance(data, dict):
        raise UserError(f"{path}: there is no such key; the path goes through a value, not a section")
    head, *rest = keys
    changed: dict[str, Any] = dict(data or {})
    changed[head] = _with_value(changed.get(head), rest, value, path) if rest else value
    return changed


def validate(data: Mapping[str, Any], algorithms: Mapping[str, type[AlgorithmSettings]]) -> AnyConfig:
    """The configuration that `data` describes; `algorithms` gives each algorithm's settings by its name.

    Raises UserError with the path of the first key that is wrong and what would be right.
    """
    section = data.get("algorithm", {})
    name = section.get("name", "dqn") if isinstance(section, dict) else "dqn"
    if not isinstance(name, str) or name not in algorithms:
        raise UserError(f"algorithm.name: there is no algorithm {name!r}" + nearest(str(name), algorithms))
    model = Config[algorithms[name]]  # type: ignore[valid-type]
    try:
        return model.model_validate({"algorithm": {"name": name}, **data})
    except ValidationError as error:
        raise UserError(explain(model, error)) from error


def check_name(key: str, name: str, registry: Mapping[str, Any]) -> None:
    """Raise UserError unless `name`, the value of `key`, is in the registry."""
    if name not in registry:
        raise UserError(f"{key}: there is no {name!r}" + nearest(name, registry))
