"""The configuration of an experiment, of the sections in `learning`, `evolution` and `run`, and what fits together.

Every default is in this package.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Self, TypeVar

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from evorl.config.algorithms import SETTINGS
from evorl.config.errors import explain
from evorl.config.evolution import Evolution, PopulationSettings
from evorl.config.fields import (
    EXPONENT,
    RETURN,
    AlgorithmSettings,
    HyperparameterRange,
    Section,
    algorithm_of,
)
from evorl.config.learning import ActorSettings, Network, Replay
from evorl.config.run import Checkpoint, Environment, Evaluation, LeagueSettings, RunSettings, Tracking, Training
from evorl.system.plugins import entries, installed
from evorl.types.messages import nearest, shown
from evorl.types.outcomes import UserError

MAX_COPIES = 2**16


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
        return self.model_copy(update={"network": network, "actors": actors, "evolution": evolution})

    @model_validator(mode="before")
    @classmethod
    def _without_frozen(cls, data: Any) -> Any:
        """Leave out the ranges of hyperparameters whose range is null; of nothing else, take the algorithm's ranges.

        Names are looked at here, since a misspelt one may have half a range, whose other end would be missed; its error
        comes without those of other settings.
        """
        evolution = data.get("evolution") if isinstance(data, dict) else None
        ranges = evolution.get("hyperparameters") if isinstance(evolution, dict) else None
        if not isinstance(ranges, dict):
            return data
        settings: Any = cls.model_fields["algorithm"].annotation
        if others := [name for name in ranges if name not in settings.hyperparameters]:
            algorithm = settings.model_fields["name"].default
            reason = f"evolution.hyperparameters.{others[0]}: {algorithm} has no hyperparameter of this name"
            raise ValueError(reason + nearest(str(others[0]), settings.hyperparameters))
        frozen = {name for name, ends in ranges.items() if ends is None}
        if not frozen:
            return data
        left = {name: ends for name, ends in ranges.items() if name not in frozen}
        if not left:
            with contextlib.suppress(ValidationError):  # Reported with those of all other settings.
                algorithm = settings.model_validate(data["algorithm"])
                left = {name: ends for name, ends in algorithm.default_ranges().items() if name not in frozen}
        return {**data, "evolution": {**data["evolution"], "hyperparameters": left}}

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
        if self.evaluation.fitness == "training":
            self._check_training_fitness()
        for name, ends in (self.resolved().evolution.hyperparameters or {}).items():
            self._check_hyperparameter(name, ends)
        return self

    def _check_population(self) -> None:
        """Raise ValueError if selection, checkpoints or environments do not suit the population."""
        selection, size = self.evolution.selection, self.population.size
        for name in self.population.hyperparameters:
            if name not in self.algorithm.hyperparameters:
                raise ValueError(
                    f"population.hyperparameters: agents of {self.algorithm.name} have no hyperparameter {shown(name)}"
                    + nearest(name, self.algorithm.hyperparameters)
                )
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
        if self.population.control and selection.name == "none":
            raise ValueError(
                "population.control: evolution.selection.name is none, so there is no evolution to compare with none; "
                "leave one of them out"
            )
        if (agents := self.population.agents) * self.environment.num_envs > MAX_COPIES:
            raise ValueError(
                f"environment.num_envs: {self.environment.num_envs} for each of {agents} agents make more than "
                f"{MAX_COPIES} environments"
            )

    def _check_replay(self) -> None:
        """Raise ValueError if nothing is replayed, or learning could never start."""
        if not self.algorithm.replayed and self.replay != (plain := Replay()):
            name = next(name for name, value in self.replay if value != getattr(plain, name))
            raise ValueError(f"replay.{name}: {self.algorithm.name} learns from rollouts; leave it out")
        if self.replay.learning_starts > self.replay.capacity:
            raise ValueError(
                f"replay.learning_starts: {self.replay.learning_starts} transitions never fit into "
                f"replay.capacity {self.replay.capacity}; use at most {self.replay.capacity}"
            )

    def _check_hyperparameter(self, name: str, ends: HyperparameterRange) -> None:
        """Raise ValueError if evolution cannot perturb a setting between these ends, or that would have no effect."""
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

    def _check_training_fitness(self) -> None:
        """Raise ValueError if training episodes cannot measure an agent's fitness."""
        if self.evaluation.environment is not None:
            raise ValueError(
                "evaluation.environment: with evaluation.fitness=training, fitness is the return in the environment of "
                "training; use evaluation.fitness=evaluation"
            )
        if self.evolution.fitness != {RETURN: 1.0}:
            terms = " + ".join(f"{name} x {weight:g}" for name, weight in self.evolution.fitness.items())
            raise ValueError(
                f"evaluation.fitness: training counts only returns, and evolution.fitness is {terms}; use evaluation, "
                "or evolution.fitness=return"
            )

    @property
    def evaluation_environment(self) -> Environment:
        """The environment of evaluation episodes."""
        environment, other = self.environment, self.evaluation.environment
        if other is None:
            return environment
        id = other.id or environment.id
        kwargs = {**(environment.kwargs if id == environment.id else {}), **other.kwargs}
        return environment.model_copy(update={"id": id, "kwargs": kwargs})

    def effective_value(self, name: str, value: float) -> float:
        """Return a hyperparameter's value as used in training, the form in which it is displayed."""
        if not math.isfinite(value):
            return value
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


def validate(data: Mapping[str, Any]) -> AnyConfig:
    """Validate `data` and return the effective configuration.

    Raises UserError with the path of each invalid key and what would be valid.
    """
    name = algorithm_of(data)
    settings = None if name is None else SETTINGS.get(name) or installed("evorl.settings", name, AlgorithmSettings)
    if settings is None:
        wrong_name = name or data["algorithm"]
        known = [*SETTINGS, *(entry.name for entry in entries("evorl.settings"))]
        raise UserError(f"algorithm.name: there is no algorithm {shown(wrong_name)}" + nearest(str(name), known))
    model = model_of(settings)
    try:
        return model.model_validate({"algorithm": {"name": name}, **data}).resolved()
    except ValidationError as error:
        raise UserError(explain(model, error)) from None  # Its text is for programmers.


def check_name(key: str, name: str, registry: Mapping[str, Any] | Sequence[str]) -> None:
    """Raise UserError unless `name`, the value of `key`, is registered."""
    if name not in registry:
        raise UserError(f"{key}: there is no {shown(name)}" + nearest(name, registry))
