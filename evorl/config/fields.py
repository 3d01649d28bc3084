"""The base class of configuration sections, common field types, and the settings of every algorithm."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from evorl.config.errors import explain
from evorl.system.plugins import name_of
from evorl.types.messages import shown
from evorl.types.outcomes import UserError

Count = Annotated[int, Field(ge=1, le=10**12)]
Size = Annotated[int, Field(ge=1, le=2**20)]
"""A count of objects that are all held in memory."""
Width = Annotated[int, Field(ge=1, le=2**16)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Weight = Annotated[float, Field(ge=0, le=1e9)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]


Text = Annotated[str, Strict()]
"""A string; bytes are not coerced."""


def _plain(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{shown(text)} has letters that cannot be printed")
    return text


Plain = Annotated[Text, AfterValidator(_plain)]
"""A string without line breaks or other control characters."""


def _by_name(value: object, info: ValidationInfo) -> object:
    return name_of(value, str(info.field_name)) if isinstance(value, type | FunctionType) else value


Importable = Annotated[Plain, BeforeValidator(_by_name)]
"""The name of a class or function, or in Python that class or function itself."""


EXPONENT = "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
"""YAML resolver for numbers such as 1e-3, which need a decimal point by default: tag, pattern, first characters."""
Place = TypeVar("Place", str, Path)


def from_home(place: Place) -> Place:
    """A path with `~` replaced by the home directory, as a shell does; a name that does not begin so is unchanged."""
    if not str(place).startswith("~"):
        return place
    try:
        return type(place)(Path(place).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{shown(str(place))}: there is no home directory of this name") from error


UserPath = Annotated[Path, AfterValidator(from_home)]
"""A path as its user writes it, which may begin with `~`."""


RETURN, INFO = "return", "info."
"""Fitness terms: the episode return, and the prefix of a number in the environment's `info`."""
BENCHMARK = "league.benchmark"
"""The setting that names an opponent."""
RANDOM = "random"
"""The opponent that plays uniformly random moves."""
RATING = "rating"
"""The fitness term for games: the agents' rating, which cannot be combined with other terms."""


def _weights(given: Any) -> Any:
    """Weights by name: 1 for a bare name; `{info: {KEY: ...}}`, as an override is parsed, becomes `info.KEY`."""
    if isinstance(given, str):
        return {given: 1.0}
    return leaves(given) if isinstance(given, Mapping) else given


def _are_terms(weights: dict[str, float]) -> dict[str, float]:
    if RATING in weights and weights != {RATING: 1.0}:
        raise ValueError(f"{RATING} stands alone, without a weight")
    for name, weight in weights.items():
        if name not in (RETURN, RATING) and not (name.startswith(INFO) and name != INFO):
            raise ValueError(
                f"{shown(name)} is neither {RETURN!r} nor '{INFO}KEY', KEY being one of the environment's info, nor, "
                f"in a game, {RATING!r}"
            )
        if weight == 0:
            raise ValueError(f"{name} has the weight 0; leave it out")
    if not weights:
        raise ValueError(f"no term is left; {RETURN!r} is the default")
    return weights


FitnessTerms = Annotated[dict[Plain, Finite], BeforeValidator(_weights), AfterValidator(_are_terms)]
"""Fitness terms with their weights; a bare name has weight 1."""


class Section(BaseModel):
    """A part of the configuration: immutable, and without unknown keys."""

    # Otherwise a run's saved configuration would have null for an infinite number.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")

    if not TYPE_CHECKING:  # Checkers and editors know the settings of a section from its fields.

        def __init__(self, /, **settings: Any) -> None:
            """Construct a section in Python. Raises UserError for invalid settings, in one line that names them."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise UserError(f"{type(self).__name__}: {explain(type(self), error)}") from None

        # Without this mark, pydantic would also call `__init__` for sections within a configuration, whose errors are
        # explained together, each with its path.
        __init__.__pydantic_base_init__ = True

    def ineffective(self, name: str) -> str | None:
        """Return why a setting has no effect given the others of its section, or None if it has one."""
        return None

    def ineffective_changes(self, key: str) -> Iterator[tuple[str, str]]:
        """Settings that differ from their defaults and have no effect: their keys, below `key`, and why."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default and (reason := self.ineffective(name)):
                yield f"{key}.{name}", reason
            elif isinstance(value, Section):
                yield from value.ineffective_changes(f"{key}.{name}")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Return a setting's value. Raises ValueError where a number is true or false, which would pass for 1 or 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and _takes(annotation, int, float) and not _takes(annotation, bool):
            wanted = "a whole number" if _takes_only_whole(annotation) else "a number"
            raise ValueError(f"{shown(value)} does not fit: it must be {wanted}")
        return value


Initialisation = Literal["uniform", "orthogonal"]
"""Weight initialisation of a network, defined in `evorl.networks.parameters.ParameterSpec`."""
Scale = Literal["log", "linear", "one_minus_log"]


class HyperparameterRange(Section):
    """The range of one hyperparameter: it bounds mutations, and with `evolution.initial: sampled` initial values are
    drawn from it."""

    min: Finite
    """The least value."""
    max: Finite
    """The largest value."""
    scale: Scale | None = None
    """`log` multiplies the value by `grow` or `shrink`, `one_minus_log` divides its distance from 1 by them, `linear`
    moves it by (factor - 1) of the range. Null is `one_minus_log` for what the algorithm counts as near one, such as
    `gamma`, and `log` for all else."""
    grow: Annotated[float, Field(gt=1, le=1e9)] | None = None
    """The factor of an upward perturbation. Null is 2, and on a linear scale 1.2, where 2 would be the whole range."""
    shrink: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The factor of a downward perturbation. Null is the inverse of `grow`, so that settings do not drift without
    selection: 1 / grow, or 2 - grow on a linear scale."""
    resample: Fraction = 0.25
    """The share of mutations that draw a new value from the whole range (as in PBT, arXiv 1711.09846)."""

    @property
    def factors(self) -> tuple[float, float]:
        """Return the perturbation factors (up, down)."""
        linear = self.scale == "linear"
        up = self.grow if self.grow is not None else 1.2 if linear else 2.0
        undoing = 2 - up if linear else 1 / up
        return up, undoing if self.shrink is None else self.shrink

    def at(self, share: float) -> float:
        """Interpolate between `min` and `max` on the range's scale, at `share` in [0, 1]; clipped beyond."""
        low, high = (1 - self.min, 1 - self.max) if self.scale == "one_minus_log" else (self.min, self.max)
        value = low + share * (high - low) if self.scale == "linear" else low * (high / low) ** share
        value = 1 - value if self.scale == "one_minus_log" else value
        return float(min(max(value, self.min), self.max))

    def validation_error(self) -> str | None:
        """Return why the bounds are invalid on this scale, or None."""
        if not self.min < self.max:
            return f"min {self.min:g} must be below max {self.max:g}"
        if self.scale == "log" and self.min <= 0:
            return f"min {self.min:g} must be above 0 on a log scale"
        if self.scale == "one_minus_log" and self.max >= 1:
            return f"max {self.max:g} must be below 1 on the scale one_minus_log; use 0.999, or scale: linear"
        return None

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if reason := self.validation_error():
            raise ValueError(reason)
        return self


class AlgorithmSettings(Section):
    """The settings that every algorithm has; the rest are in the algorithm's file."""

    name: str = "dqn"
    """The algorithm."""
    reward_clip: Positive | None = None
    """Agents learn from rewards clipped to ± this much; fitness and returns count the true ones."""
    split_batches: bool = False
    """As in Accelerate: `batch_size`, `learn_step` and `rollout_steps` count over all ranks that hold an agent, so that
    any number of ranks makes the same updates. Without it they count on each rank, and R ranks make 1/R of the updates
    for each environment step, with R times the batch."""

    adam_epsilon: Rate = 1e-8
    """The epsilon that Adam adds to the root of the second moment."""
    max_grad_norm: Positive | None = None
    """The norm to which an agent's gradient is clipped; null disables clipping."""
    normalize_observations: bool = False
    """Shift and scale vectors by each agent's running mean and variance; agents that share a replay share those too."""

    actor_messages: ClassVar[str | None] = None
    """Kind of message from actor processes to the learner (`evorl.actors.collectors`); null: there are no actors."""
    replayed: ClassVar[bool] = False
    """True if the algorithm learns from a replay buffer, which the section `replay` configures."""
    initialisation: ClassVar[Initialisation] = "uniform"
    """The initialisation of networks where `network.initialisation` is null."""
    layer_norm: ClassVar[bool] = False
    """Normalise hidden layers where `network.layer_norm` is null."""
    hyperparameters: ClassVar[tuple[str, ...]] = ()
    """The settings that differ between agents and that evolution may perturb."""
    near_one: ClassVar[tuple[str, ...]] = ()
    """Those whose distance from 1 is what matters, so that mutations use the scale `one_minus_log`."""
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {}
    """The ranges within which evolution perturbs them where the configuration gives none."""

    def effective_value(self, name: str, value: float, num_envs: int, *, recurrent: bool) -> float:
        """Return a hyperparameter's value as used in training; evolution perturbs integers continuously."""
        return round(value) if self._is_whole(name) else value

    def _is_whole(self, name: str) -> bool:
        return name in type(self).model_fields and _takes_only_whole(type(self).model_fields[name].annotation)

    @property
    def frozen_on_resume(self) -> tuple[str, ...]:
        """Return settings of other sections that may not change on resume, because learned state depends on them."""
        return ()

    def warning(self, metrics: Mapping[str, NDArray[np.float64]], returns: NDArray[np.float64]) -> str | None:
        """Return a warning about a generation's metrics [P] by name, or None; `returns` [P] are those of its episodes,
        NaN where none ended."""
        return None

    def first_hyperparameters(self) -> dict[str, float]:
        """Return an agent's initial hyperparameters from the configuration, without those that are null."""
        values = {name: getattr(self, name) for name in self.hyperparameters}
        return {name: float(value) for name, value in values.items() if value is not None}

    def scaled(self, ranges: Mapping[str, HyperparameterRange]) -> dict[str, HyperparameterRange]:
        """Return `ranges` by hyperparameter, with unset scales filled in."""
        return {
            name: range.model_copy(update={"scale": "one_minus_log" if name in self.near_one else "log"})
            if range.scale is None
            else range
            for name, range in ranges.items()
        }

    def default_ranges(self) -> dict[str, HyperparameterRange]:
        """Return the algorithm's default ranges for these settings.

        A range is widened to include the configured value, so that the first mutation does not jump. Disabled settings
        have none: those that are null, or 0 on a log scale.
        """
        ranges: dict[str, HyperparameterRange] = {}
        for name, range in self.scaled(self.ranges).items():
            value = getattr(self, name)
            if value is None or (value == 0 and range.scale == "log"):
                continue
            wider = range.model_copy(update={"min": min(range.min, float(value)), "max": max(range.max, float(value))})
            # A trace decay of 1 has no logarithm on `one_minus_log`: keep the range, the value is clipped into it.
            ranges[name] = range if wider.validation_error() else wider
        return ranges

    def validation_error(self, name: str, value: float) -> str | None:
        """Return why a hyperparameter cannot have this value, or None; integers are rounded."""
        try:
            type(self).model_validate(self.model_dump() | {name: round(value) if self._is_whole(name) else value})
        except (ValidationError, ValueError, OverflowError) as error:
            return explain(type(self), error) if isinstance(error, ValidationError) else f"{name}: {error}"
        return None


DEFAULT_ALGORITHM: str = AlgorithmSettings.model_fields["name"].default


def algorithm_of(data: Mapping[str, Any]) -> str | None:
    """Return the name of the algorithm in a file's settings, or None if it is not a string."""
    section = data.get("algorithm", {})
    name = section.get("name", DEFAULT_ALGORITHM) if isinstance(section, dict) else section
    return name if isinstance(name, str) else None


def _takes(annotation: Any, *kinds: Any) -> bool:
    """Return whether one of `kinds` is in a field's type, also in lists and mappings; sections check their own."""
    # What a Literal allows is among its arguments as a value.
    return (
        annotation in kinds or type(annotation) in kinds or any(_takes(inner, *kinds) for inner in get_args(annotation))
    )


def _takes_only_whole(annotation: Any) -> bool:
    """Return whether a field's type is an integer, or null."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return annotation is int or bool(kinds and _takes_only_whole(kinds[0]))


def given_in(section: BaseModel) -> dict[str, Any]:
    """Return the settings given explicitly when a section was constructed, as nested mappings by key.

    An inner section without any is left out, unless it may be null.
    """
    settings: dict[str, Any] = section.model_dump(exclude_unset=True)
    kinds = {field.alias or name: field.annotation for name, field in type(section).model_fields.items()}
    plain = {key for key, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    return {key: value for key, value in settings.items() if value != {} or key not in plain}


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key; an empty mapping is a value."""
    by_key: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping) and value
        by_key |= leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return by_key


def without(settings: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A copy of nested settings without those at some dotted keys, where there are any."""
    left: dict[str, Any] = deepcopy(dict(settings))
    for key in keys:
        *sections, name = key.split(".")
        inner: Any = left
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(name, None)
    return left
