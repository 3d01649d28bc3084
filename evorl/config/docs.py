"""Configuration documentation, introspected from the models."""

from __future__ import annotations

import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from evorl.config.errors import NAME, bounds_of, keys_of, section_in
from evorl.config.fields import leaves
from evorl.config.schema import AnyConfig, as_yaml
from evorl.types.messages import nearest
from evorl.types.outcomes import UserError

WORDS: Mapping[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
RANGES = "evolution.hyperparameters"
MARGIN = " " * 4
NO_VALUE = object()
"""In place of the value of a section, whose keys have values of their own."""


@dataclass(frozen=True)
class Setting:
    """One configuration key, with its description (`sentence`).

    `kind` describes the accepted type and range; `default` is the default as YAML, empty for a section that cannot be
    null. The keys of a section follow it.
    """

    path: str
    kind: str
    default: str
    sentence: str


def settings_of(model: type[BaseModel], prefix: str = "") -> list[Setting]:
    """Return all keys of a model recursively, each section followed by its own keys."""
    collected: list[Setting] = []
    sections: dict[str, BaseModel] = {}
    """The sections that a default has, by path: their values may differ from those of their own models."""
    for path, owner, name in keys_of(model, prefix):
        field = owner.model_fields[name]
        inner, above = section_in(field.annotation), sections.get(path.rpartition(".")[0])
        value = _default(field) if above is None else getattr(above, name)
        if inner is not None and type(value) is inner:
            sections[path] = value
        sentence = sentence_of(owner, name) or (own_sentence(inner) if inner else "")
        default = "" if inner is field.annotation else _as_yaml(value)
        collected.append(Setting(path, _takes(field), default, sentence))
    return collected


def explained(settings: Sequence[Setting], key: str, config: AnyConfig) -> list[str]:
    """Return the help lines for a key and all keys below it, with the values and ranges of `config`.

    A key may be given by its last part; what is no key is looked for in the descriptions. Raises UserError if it is
    nowhere.
    """
    values, ranges = leaves(config.model_dump(mode="json")), config.evolution.hyperparameters or {}
    lines: list[str] = []
    for setting in _matching(settings, key):
        default = f" (default: {setting.default})" if setting.default else ""
        value = values.get(setting.path, NO_VALUE)
        here = f"; here: {_as_yaml(value)}" if value is not NO_VALUE else ""
        lines.append(f"{setting.path}: {setting.kind}{default}{here}")
        lines += textwrap.wrap(setting.sentence, 110, initial_indent=MARGIN, subsequent_indent=MARGIN)
        name = setting.path.removeprefix("algorithm.")
        if name not in config.algorithm.hyperparameters or name == setting.path:
            continue
        if config.population.size == 1 or config.evolution.selection.name == "none":
            lines.append(f"{MARGIN}Evolution does not change it here: it replaces no agent.")
        elif config.evolution.mutation.hyperparameters == 0:
            lines.append(f"{MARGIN}Evolution does not change it here: evolution.mutation.hyperparameters is 0.")
        elif name in ranges:
            lines.append(f"{MARGIN}Evolution changes it between {ranges[name].min:g} and {ranges[name].max:g}.")
        else:
            range = f"{RANGES}.{name}"
            lines.append(f"{MARGIN}Evolution does not change it here; it could, by a range {range}.")
    return lines


def _matching(settings: Sequence[Setting], key: str) -> list[Setting]:
    """The key and those below it; else the only one of this last part; else those whose descriptions have the word."""
    name = key.removeprefix(f"{RANGES}.").partition(".")[0]
    if any(setting.path == f"algorithm.{name}" for setting in settings):
        key = key.replace(f"{RANGES}.{name}", f"{RANGES}.{NAME}")
    exact = [setting for setting in settings if setting.path == key or setting.path.startswith(f"{key}.")]
    named = [setting for setting in settings if setting.path.endswith(f".{key}")]
    if exact or len(named) == 1:
        return exact or named
    if len(named) > 1:
        raise UserError(f"--explain: {key!r} is one of {', '.join(setting.path for setting in named)}")
    word = key.lower()
    described = [setting for setting in settings if word in f"{setting.path} {setting.sentence}".lower()]
    if described and "." not in key:
        return described
    raise UserError(f"--explain: there is no key {key!r}" + nearest(key, [setting.path for setting in settings]))


def sentence_of(model: type[BaseModel], name: str) -> str:
    """Return the attribute docstring of a field on one line: the model's own, or that of the nearest base model."""
    parts = (vars(part).get("__pydantic_fields__", {}) for part in model.__mro__)
    texts = (fields[name].description for fields in parts if name in fields)
    return " ".join(next(filter(None, texts), "").split())


def own_sentence(model: type[BaseModel]) -> str:
    """Return a model's docstring on one line, or that of its nearest base model if it has none."""
    texts = (vars(part).get("__doc__") for part in model.__mro__ if part.__module__ != BaseModel.__module__)
    return " ".join(next((text for text in texts if text), "").split())


def _takes(field: FieldInfo) -> str:
    """Describe the type and range that a field accepts."""
    kind = _kind(field.annotation).removesuffix(" or null")
    takes = ", ".join(filter(None, (kind, bounds_of(field.annotation, field.metadata))))
    return f"{takes}; or null" if type(None) in typing.get_args(field.annotation) else takes


def _kind(annotation: Any) -> str:
    """Describe the type of an annotation."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return " or ".join(value if isinstance(value, str) else json.dumps(value) for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_kind, inner)))
    if origin is tuple:
        return f"list of {_plural(inner[0])}"
    if origin is dict:
        return "mapping" if inner[1] is Any else f"{_plural(inner[1])} by name"
    return WORDS.get(annotation, "section")


def _plural(annotation: Any) -> str:
    kind = _kind(annotation)
    return kind if kind == WORDS[str] else f"{kind}s"


def _default(field: FieldInfo) -> Any:
    """Return a field's default; "none" if it must be given."""
    return "none" if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def _as_yaml(value: Any) -> str:
    """Write a default as one-line YAML."""
    return value if isinstance(value, str) and value else json.dumps(to_jsonable_python(value), ensure_ascii=False)


WIDTH = 110


def commented(data: Mapping[str, Any], settings: Sequence[Setting]) -> str:
    """Return a configuration as YAML, with each key's description in a comment above it."""
    by_path = {setting.path: setting for setting in settings}
    return "\n".join(_lines(data, by_path, "")).lstrip() + "\n"


def _lines(data: Mapping[str, Any], known: Mapping[str, Setting], prefix: str) -> Iterator[str]:
    margin = "  " * prefix.count(".")
    for key, value in data.items():
        path = f"{prefix}{key}"
        sentence = known[path].sentence if path in known else ""
        if not prefix:
            yield ""
        yield from textwrap.wrap(sentence, WIDTH, initial_indent=f"{margin}# ", subsequent_indent=f"{margin}# ")
        if isinstance(value, Mapping) and value and all(f"{path}.{inner}" in known for inner in value):
            yield f"{margin}{key}:"
            yield from _lines(value, known, f"{path}.")
        else:
            yield from (f"{margin}{line}" for line in _entry(key, value))


def _entry(key: str, value: Any) -> Iterator[str]:
    """Yield the YAML lines of a key; mappings of mappings take one line per entry."""
    if isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values()):
        yield f"{key}:"
        yield from (f"  {line}" for inner, below in value.items() for line in _entry(inner, below))
    else:
        text = as_yaml(value, default_flow_style=True, width=10**6)
        yield f"{key}: {text.removesuffix('...' + chr(10)).strip()}"
