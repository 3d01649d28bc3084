"""One-line error messages for invalid configurations."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from evorl.types.messages import on_one_line, shown

MAX_LETTERS = 450
"""Maximum characters of the message for one invalid setting."""
KINDS: Mapping[str, str] = {
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
}
"""Valid values by the type of an error of pydantic."""
NAME, NUMBER = "NAME", "NUMBER"
"""What stands in a path for a user's name in a mapping, and for a place in a list."""
LISTS = ("tuple_type", "list_type")
ELSEWHERE: Mapping[str, str] = {
    "batch": "algorithm.batch_size",
    "buffer_size": "replay.capacity",
    "clip_range": "algorithm.clip",
    "ent_coef": "algorithm.entropy_coefficient",
    "env": "environment.id",
    "env_id": "environment.id",
    "environment.name": "environment.id",
    "epsilon": "algorithm.exploration",
    "generations": "training.max_steps",
    "lr": "algorithm.learning_rate",
    "lstm": "network.recurrent",
    "n_envs": "environment.num_envs",
    "n_epochs": "algorithm.epochs",
    "n_steps": "algorithm.rollout_steps",
    "net_arch": "network.hidden_sizes",
    "population.n": "population.size",
    "steps": "training.max_steps",
    "timesteps": "training.max_steps",
    "total_timesteps": "training.max_steps",
    "train_freq": "algorithm.learn_step",
    "vf_coef": "algorithm.value_coefficient",
    "wandb": "tracking.backends",
}
"""Settings by their names in Stable-Baselines3, CleanRL and other libraries, or by the first guess."""


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """Describe all errors on one line, each with path, value and what would be valid; unknown keys come first."""
    # A default computed from other settings has no value if those are invalid.
    errors = [problem for problem in error.errors(include_url=False) if problem["type"] != "default_factory_not_called"]
    problems = sorted(_united(errors), key=lambda problem: problem["type"] != "extra_forbidden")
    texts = list(dict.fromkeys(on_one_line(_explanation(model, problem), MAX_LETTERS) for problem in problems))
    if len(texts) == 1:
        return texts[0]
    numbered = [f"({number}) {text}" for number, text in enumerate(texts, 1)]
    return f"{len(texts)} settings are wrong: {' '.join(numbered)}"


def _united(problems: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Merge the two errors of a value that may also be a word such as `auto` into one, with the word in its context."""
    literal = [error for error in problems if error["type"] == "literal_error"]
    words = {error["loc"][:-1]: error["msg"] for error in literal if str(error["loc"][-1]).startswith("literal[")}
    united: list[ErrorDetails] = []
    for error in problems:
        path = error["loc"][:-1]
        if path not in words:
            united.append(error)
        elif error["type"] != "literal_error":
            united.append({**error, "loc": path, "ctx": {"word": words[path].removeprefix("Input should be ")}})
    return united


def _explanation(model: type[BaseModel], problem: ErrorDetails) -> str:
    text, word = _without_words(model, problem), problem.get("ctx", {}).get("word")
    return text if word is None else f"{text}, or {word}"


def _without_words(model: type[BaseModel], problem: ErrorDetails) -> str:
    location = tuple(str(part) for part in problem["loc"])
    path, kind, value = ".".join(location), problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        return f"{path}: unknown key" + _nearest_path(model, location)
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"):
        return f"{path}: {shown(value)} is out of range; it must be {_range_at(model, location)}"
    if kind == "missing":
        return f"{path}: this key is required"
    if kind == "dict_type":
        return f"{path}: {shown(value)} does not fit: it must be a mapping, such as {{name: ...}}"
    if kind == "model_type":
        section = _section_at(model, location)
        keys = ": " + ", ".join(_names(section)) if section is not None and section is not model else ""
        return f"{path}: {shown(value)} does not fit: this is a section, with keys of its own{keys}"
    if kind in KINDS:
        return f"{path}: {shown(value)} does not fit: it must be {KINDS[kind]}"
    if kind in LISTS:
        parts = [part for part in re.split(r"[,\s]+", value) if part] if isinstance(value, str) else [shown(value)]
        return f"{path}: {shown(value)} does not fit: it must be a list, such as [{on_one_line(', '.join(parts), 80)}]"
    if kind == "too_short":
        return f"{path}: {shown(value)} does not fit: it must have at least {problem['ctx']['min_length']} entry"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path or 'configuration'}: {shown(value)} does not fit: {message}"


def _nearest_path(model: type[BaseModel], location: tuple[str, ...]) -> str:
    """Return the end of an error message: the settings most like an unknown one, or all of its section."""
    section = _section_at(model, location[:-1])
    if section is None:
        return ""
    keys = {key.lower(): key for key, _, _ in keys_of(model) if not in_collection(key)}
    path = ".".join(location).lower()[:MAX_LETTERS]
    above, _, name = path.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == above}
    similar = (
        [key for key in (ELSEWHERE.get(path), ELSEWHERE.get(name)) if key in keys][:1]
        or [key for key in keys if key.rpartition(".")[2] == name]
        or [beside[match] for match in difflib.get_close_matches(name, beside, n=1)]
    )
    if similar:
        return f"; did you mean {' or '.join(repr(keys[key]) for key in similar)}?"
    return f"; known here: {', '.join(_names(section))}"


def _names(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield every section and setting: its path, the model that has it, and its name there.

    Keys of a section in a mapping have `NAME` before them, those of one in a list `NUMBER`.
    """
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path, model, name
        if section := section_in(field.annotation):
            yield from keys_of(section, ".".join([path, *_collections_in(field.annotation), ""]))


def in_collection(path: str) -> bool:
    """True if a path of `keys_of` leads into a mapping or a list, so that no setting can be given by it."""
    return not {NAME, NUMBER}.isdisjoint(path.split("."))


def _collections_in(annotation: Any) -> list[str]:
    here = {dict: [NAME], tuple: [NUMBER]}.get(typing.get_origin(annotation), [])
    return here + [each for inner in typing.get_args(annotation) for each in _collections_in(inner)]


def _section_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    for part in location:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        section = section_in(annotation)
        if section is not None:
            model = section
        elif annotation is not None:
            return None
    return model


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation, also inside `X | None`, `dict[str, X]` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_in, typing.get_args(annotation))), None)


def _range_at(model: type[BaseModel], location: tuple[str, ...]) -> str:
    """Describe the valid range of the value at `location`."""
    section = _section_at(model, location[:-1]) or _section_at(model, location[:-2])
    name = location[-1] if section and location[-1] in section.model_fields else location[-2]
    if section is None or name not in section.model_fields:
        return "a number of at least 0"
    return bounds_of(section.model_fields[name].annotation, section.model_fields[name].metadata) or "a finite number"


def bounds_of(annotation: Any, metadata: Sequence[Any]) -> str:
    """Describe the range of a field, or return an empty string if it has none."""
    words = {Ge: "at least {0.ge:.10g}", Gt: "above {0.gt:.10g}", Le: "at most {0.le:.10g}", Lt: "below {0.lt:.10g}"}
    constraints = _constraints(annotation, metadata)
    bounds = [text.format(item) for item in constraints for kind, text in words.items() if isinstance(item, kind)]
    return " and ".join(bounds)


def _constraints(annotation: Any, metadata: Sequence[Any]) -> list[Any]:
    """Return the bounds of a field, including those nested in `X | None` or `tuple[X, ...]`."""
    members: list[Any] = []
    for item in metadata:
        nested = getattr(item, "metadata", None)
        members += _constraints(None, nested) if nested else list(item) if isinstance(item, Interval) else [item]
    for argument in typing.get_args(annotation):
        members += _constraints(argument, getattr(argument, "__metadata__", ()))
    return [item for item in members if isinstance(item, Ge | Gt | Le | Lt)]
