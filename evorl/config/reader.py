"""Parsing of settings: YAML files, and command-line overrides."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from evorl.config.errors import on_one_line, shown
from evorl.config.plain import check_text, check_whole
from evorl.types import UserError

MAX_BYTES = 2**17
"""Maximum size of a configuration in bytes; the largest shipped one has some thousands."""
MAX_VALUES = 10_000
"""Maximum values with aliases expanded: a few lines of aliases can stand for more than memory holds."""
SHORT = {"environment": "id", "algorithm": "name"}
"""The key that a bare string in place of a section sets, as in `environment: CartPole-v1`."""
MAX_DEPTH = 50
"""Maximum bracket nesting; the parser takes seconds to give up on thousands."""


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that parses 1e-3 as a number, and rejects tags, duplicate keys and unbounded aliases."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise yaml.scanner.ScannerError(None, None, "it is nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(token)

    def fetch_tag(self) -> None:
        # A tag changes a value's type: `!!binary` let a module's name bypass every check of text.
        raise yaml.scanner.ScannerError(None, None, "it has a tag (`!`); values are plain", self.get_mark())

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"it stands for more than {MAX_VALUES} values")
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text: str = super().construct_scalar(node)
        try:
            check_text(text)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
        return text

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number: int = super().construct_yaml_int(node)
        try:
            check_whole(number)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        for key in mapping:
            if not isinstance(key, str):
                # Numeric keys would not survive the round trip through a run's saved configuration.
                raise yaml.constructor.ConstructorError(None, None, f"key {shown(key)} is no text", node.start_mark)
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _values(node: yaml.Node, known: dict[int, float]) -> float:
    """Count the values of a node with aliases expanded; infinite for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = [part if isinstance(part, tuple) else (part,) for part in parts]
        known[id(node)] = 1 + sum(_values(part, known) for pair in pairs for part in pair)
    return known[id(node)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises UserError if it is unreadable or not a mapping."""
    where = on_one_line(str(path))
    try:
        with path.open("rb") as file:
            payload = file.read(MAX_BYTES + 1)
        if len(payload) > MAX_BYTES:
            raise UserError(f"{where}: cannot read the configuration: it has more than {MAX_BYTES} bytes")
        data = _parse(payload.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{where}: cannot read the configuration: {reason}") from error
    except yaml.YAMLError as error:
        reason = on_one_line(" ".join(str(error).split()), 200)
        raise UserError(f"{where}: not valid YAML: {reason}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{where}: the configuration must be a mapping of sections, not a {type(data).__name__}")
    return data | {key: {name: data[key]} for key, name in SHORT.items() if isinstance(data.get(key), str)}


def plain_assignments(arguments: Sequence[str], *names: str) -> list[str]:
    """Strip the dashes of `--key.path=value` arguments, the form in which `wandb sweep` passes settings.

    This also applies to `names`, and to sections that a bare string may set, which have no dot.
    """
    dashed = re.compile(rf"--(\w+(\.\w+)+|{'|'.join([*SHORT, *names])})=")
    return [argument[2:] if dashed.match(argument) else argument for argument in arguments]


def override(data: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with `key.path=value` overrides applied; values are parsed as YAML. Raises UserError."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            raise UserError(f"{shown(assignment)}: an override has the form key.path=value")
        where = on_one_line(path, 80)
        try:
            value = _parse(text)
        except yaml.YAMLError as error:
            raise UserError(f"{where}: {shown(text)} is not valid YAML") from error
        if path in SHORT and isinstance(value, str):
            keys.append(SHORT[path])
        data = _with_value(data, keys, value, where)
    return data


def _parse(text: str) -> Any:
    """Parse YAML. Raises yaml.YAMLError, also for errors of the parser itself."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from error


def _with_value(data: Any, keys: list[str], value: Any, where: str) -> dict[str, Any]:
    if data is not None and not isinstance(data, dict):
        raise UserError(f"{where}: there is no such key; the path goes through a value, not a section")
    head, *rest = keys
    changed: dict[str, Any] = dict(data or {})
    changed[head] = _with_value(changed.get(head), rest, value, where) if rest else value
    return changed
