"""Write the generated parts of docs/algorithms.md: settings, shipped configurations and the ends of learning curves.

    python benchmarks/algorithm_page.py

The settings come from the models, the curves from benchmarks/data/curves.jsonl. Everything between a line
`<!-- begin NAME -->` and the next `<!-- end -->` is replaced; a test compares the page with what this would write.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from records import read_lines

from evorl.algorithms import SETTINGS
from evorl.config import AnyConfig, read_yaml, validate
from evorl.config.docs import Setting, settings_of
from evorl.config.fields import AlgorithmSettings, HyperparameterRange
from evorl.config.yaml import TRAINING, shipped_names

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "algorithms.md"
CURVES = ROOT / "benchmarks" / "data" / "curves.jsonl"
GENERATED = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PREFIX = "algorithm."


def filled(page: str) -> str:
    """Replace each generated part of the page. Raises KeyError if a part names no algorithm."""
    shipped = {name: validate(read_yaml(TRAINING / f"{name}.yaml"), SETTINGS) for name in shipped_names()}
    lines = read_lines(CURVES)
    curves = {line["configuration"]: line for line in lines}

    def part(match: re.Match[str]) -> str:
        return match[1] + "\n" + "\n".join(_section(match[2], shipped, curves)) + "\n\n" + match[3]

    return GENERATED.sub(part, page)


def _section(name: str, shipped: Mapping[str, AnyConfig], curves: Mapping[str, Any]) -> Iterator[str]:
    own = {each: config for each, config in shipped.items() if config.algorithm.name == name}
    yield "| configuration | environment | agents | target | median agent in the [figure](#learning-curves) |"
    yield "|---|---|---|---|---|"
    for each, config in own.items():
        target = config.training.target_fitness
        row = [f"[{each}](../configs/training/{each}.yaml)", config.environment.id, str(config.population.size)]
        yield "| " + " | ".join([*row, "none" if target is None else f"{target:g}", _end(curves.get(each))]) + " |"
    yield ""
    settings, base = SETTINGS[name], _base(name)
    rows = _rows(settings)
    if base is not None:
        before = set(_rows(SETTINGS[base]))
        rows = [row for row in rows if row not in before]
        narrower = _restrictions(settings, SETTINGS[base])
        if not rows:
            yield textwrap.fill(f"All settings of [{base}](#{base}), with the same defaults, but {narrower}.", 100)
            return
        yield f"All settings of [{base}](#{base}), except that these are new or different:"
        yield ""
    yield "| setting | default | range of evolution |"
    yield "|---|---|---|"
    yield from rows
    if base is not None and narrower:
        yield ""
        yield textwrap.fill(f"Unlike in {base}, {narrower}.", 100)


def _restrictions(settings: type[AlgorithmSettings], base: type[AlgorithmSettings]) -> str:
    """Settings that take only one value, unlike those of `base`, as the end of a sentence; empty if there are none."""
    kinds = {each.path: each.kind for each in settings_of(base, PREFIX)}
    narrower = [each for each in settings_of(settings, PREFIX) if kinds.get(each.path, each.kind) != each.kind]
    return "; ".join(f"`{each.path}` takes only `{each.default}`" for each in narrower)


def _rows(settings: type[AlgorithmSettings]) -> list[str]:
    """List an algorithm's settings as rows of a table. A section that cannot be null is shown by its keys."""
    shown: Sequence[Setting] = settings_of(settings, PREFIX)
    return [
        f"| `{each.path}` | `{each.default}` | {_range(settings, each.path.removeprefix(PREFIX))} |"
        for each in shown
        if each.default and each.path != f"{PREFIX}name"
    ]


def _range(settings: type[AlgorithmSettings], name: str) -> str:
    if name not in settings.hyperparameters:
        return ""
    found: HyperparameterRange | None = settings.ranges.get(name)
    return f"{found.min:g} to {found.max:g}" if found else "can be given"


def _base(name: str) -> str | None:
    """Find the algorithm whose settings another one extends, if any."""
    names = {settings: each for each, settings in SETTINGS.items()}
    return next((names[each] for each in SETTINGS[name].__mro__[1:] if each in names), None)


def _end(curve: Mapping[str, Any] | None) -> str:
    if curve is None:
        return ""
    return f"{curve['quantiles'][-1][2]:.4g} after {curve['steps'][-1]:,} steps"


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
