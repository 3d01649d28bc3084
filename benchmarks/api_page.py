"""Write the reference parts of docs/api.md: signatures and docstrings of what `import evorl` offers.

    python benchmarks/api_page.py

Everything between a line `<!-- begin NAME ... -->` and the next `<!-- end -->` is replaced: NAMEs are those of `evorl`,
or `sections` for a table of the sections of a configuration. A test compares the page with what this would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import evorl
from evorl.algorithms import SETTINGS
from evorl.config import AlgorithmSettings, Config
from evorl.config.docs import own_sentence
from evorl.config.errors import section_in

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
GENERATED = re.compile(r"(<!-- begin ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 100


def filled(page: str) -> str:
    """Replace each generated part of the page. Raises AttributeError if a part names nothing of `evorl`."""

    def part(match: re.Match[str]) -> str:
        lines = sections() if match[2] == "sections" else (line for name in match[2].split() for line in entry(name))
        return match[1] + "\n" + "\n".join(lines).strip() + "\n\n" + match[3]

    return GENERATED.sub(part, page)


def entry(name: str) -> Iterator[str]:
    """The signature and docstring of a function, or those of a class and of its public methods and properties."""
    found = getattr(evorl, name)
    if not inspect.isclass(found):
        yield from described(f"evorl.{name}", found)
        return
    if dataclasses.is_dataclass(found):
        yield from block(signature_of(f"evorl.{name}", found))
    yield from prose(found)
    for member, value in vars(found).items():
        if isinstance(value, property) and value.__doc__:
            yield from block(f"evorl.{name}.{member}: {annotation(value.fget)}")
            yield from prose(value)
        elif inspect.isfunction(value) and not member.startswith("_"):
            yield from described(f"evorl.{name}.{member}", value)


def described(name: str, function: Any) -> Iterator[str]:
    yield from block(signature_of(name, function))
    yield from prose(function)


def block(code: str) -> Iterator[str]:
    yield from ("```text", code, "```", "")


def prose(found: Any) -> Iterator[str]:
    """The paragraphs of a docstring, wrapped."""
    for paragraph in (inspect.getdoc(found) or "").split("\n\n"):
        yield textwrap.fill(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
        yield ""


def signature_of(name: str, function: Any) -> str:
    """The signature as the source has it, on one line if it fits."""
    found = inspect.signature(function)
    plain = re.sub(r": '([^']*)'", r": \1", str(found)).replace("-> 'None'", "-> None")
    plain = re.sub(r"-> '([^']*)'", r"-> \1", plain)
    if len(name + plain) <= WIDTH:
        return f"{name}{plain}"
    inner, _, result = plain[1:].rpartition(") -> ")
    parameters = re.split(r", (?=\*|\w+[:,)=]|\w+$|\*\*)", inner)
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f") -> {result}"


def annotation(function: Any) -> str:
    return str(inspect.signature(function).return_annotation)


def sections() -> Iterator[str]:
    """A table of the sections: class, place in a configuration, and docstring."""
    yield "| class | key | |"
    yield "|---|---|---|"
    keys = places(Config[AlgorithmSettings]) | dict.fromkeys(SETTINGS.values(), "algorithm")
    for settings in SETTINGS.values():
        keys = places(settings, "algorithm.") | keys
    names: dict[type[BaseModel], str] = {settings: name for name, settings in SETTINGS.items()}
    for model in sorted(keys, key=lambda model: (keys[model], model.__name__)):
        if model.__name__ in evorl.__all__:
            name = names.get(model)
            text = f"[{name}](algorithms.md#{name})" if name else own_sentence(model)
            yield f"| `evorl.{model.__name__}` | `{keys[model]}` | {text} |"


def places(model: type[BaseModel], prefix: str = "") -> dict[type[BaseModel], str]:
    """The section classes of a model at any depth, each with the dotted path at which it occurs first."""
    found: dict[type[BaseModel], str] = {}
    for name, field in model.model_fields.items():
        inner, path = section_in(field.annotation), f"{prefix}{field.alias or name}"
        if inner is not None:
            found = {inner: path} | places(inner, f"{path}.") | found
    return found


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
