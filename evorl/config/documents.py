"""Configuration documentation: commented YAML, and a Markdown page of tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import yaml

from evorl.config.described import Setting, settings_of
from evorl.config.fields import AlgorithmSettings
from evorl.config.schema import model_of

WIDTH = 110
HEAD = """# Configuration

Every key of a configuration: what it takes, its default, and what it is for. `evorl config ALGORITHM` prints a whole
configuration with the same sentences, `evorl config --explain KEY` one key. A file holds only what differs from the
defaults; on the command line a key is given as `training.max_steps=200000`, in Python as
`evorl.train(training={"max_steps": 200_000})`. The shipped files in `configs/training` replace some of the defaults.

This page is generated from the models: `evorl config --markdown > docs/configuration.md`.
"""


def commented(data: Mapping[str, Any], settings: Sequence[Setting]) -> str:
    """Return a configuration as YAML, with each key's description in a comment above it."""
    known = {setting.path: setting for setting in settings}
    return "\n".join(_lines(data, known, "")).lstrip() + "\n"


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
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
        yield f"{key}: {text.removesuffix('...' + chr(10)).strip()}"


def page(algorithms: Mapping[str, type[AlgorithmSettings]]) -> str:
    """Return the Markdown page of all keys; `algorithms` maps names to algorithm settings."""
    parts = [HEAD]
    everything = [each for each in settings_of(model_of(AlgorithmSettings)) if not each.path.startswith("algorithm.")]
    for section, group in groupby(everything, key=lambda setting: setting.path.split(".")[0]):
        first, *rest = group
        parts.append(f"## {section}\n\n{_cell(first.sentence)}\n")
        if section == "algorithm":
            parts += [_algorithm(name, model) for name, model in algorithms.items()]
        else:
            parts.append(_table(rest or [first]))
    return "\n".join(parts)


def _algorithm(name: str, model: type[AlgorithmSettings]) -> str:
    changeable = ", ".join(f"`{each}`" for each in model.hyperparameters)
    rows = [each for each in settings_of(model, "algorithm.") if each.path != "algorithm.name"]
    return f"### {name}\n\nEvolution may perturb {changeable}.\n\n{_table(rows)}"


def _table(settings: Sequence[Setting]) -> str:
    lines = ["| key | takes | default | |", "|---|---|---|---|"]
    for each in settings:
        default = f"`{_cell(each.default)}`" if each.default else ""
        lines.append(f"| `{each.path}` | {_cell(each.kind)} | {default} | {_cell(each.sentence)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
