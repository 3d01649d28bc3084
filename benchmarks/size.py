"""Count the size of the repository, as a table: code, settings, vague names, tests, documents and data.

    python benchmarks/size.py [ROOT]

ROOT is another checkout to count, such as an earlier revision's (`git archive REVISION | tar -x -C ROOT`).
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

RESEARCH = ("population", "algorithms", "networks", "replay", "evolution")
"""The folders of `evorl` that a researcher reads."""
NAME = "(?:found|each|own|known|told|given|kept|place|asked)"
VAGUE = re.compile(rf"^ *(?:\w+, )*{NAME}(?:, \w+)*(?:: [^=]+)? [-+*|&]?= |\b{NAME} := ", re.MULTILINE)
"""Assignments to a name that says nothing; loops are not counted."""


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    code, tests = sorted((root / "evorl").rglob("*.py")), sorted((root / "tests").rglob("*.py"))
    settings = leaves(root)
    unused = settings - used(root, settings)
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    data = [path for path in (root / "benchmarks").rglob("*") if path.is_file() and ".json" in path.name]
    for name, count in {
        "lines of evorl": lines(code),
        "files of evorl": len(code),
        "lines that a researcher reads": lines(path for path in code if path.parts[len(root.parts) + 1] in RESEARCH),
        "settings": len(settings),
        "settings that no shipped file, benchmark or page sets": len(unused),
        "lines that assign to a vague name": sum(len(VAGUE.findall(path.read_text())) for path in code),
        "lines of tests": lines(tests),
        "items of tests": items(root),
        "lines of documents": lines(pages),
        "live benchmark scripts": len(list((root / "benchmarks").glob("*.py"))),
        "scripts of finished experiments": len(list((root / "benchmarks" / "experiments").glob("*.py"))),
        "bytes of benchmark data": sum(path.stat().st_size for path in data),
        "lines of the changelog": lines([root / "CHANGELOG.md"]),
    }.items():
        print(f"| {name} | {count:,} |")
    print("not set:", ", ".join(sorted(unused)))


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def leaves(root: Path) -> set[str]:
    """The dotted keys of all settings that are not sections; an algorithm's are under `algorithm`."""
    sys.path.insert(0, str(root))
    algorithms = importlib.import_module("evorl.config.algorithms").SETTINGS.values()
    keys = set(keys_of(importlib.import_module("evorl.config").Config))
    return (keys - {"algorithm"}) | {key for model in algorithms for key in keys_of(model, "algorithm.")}


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a section, with NAME for any key of a mapping to sections."""
    for name, field in model.model_fields.items():
        path, section = prefix + (field.alias or name), section_of(field.annotation)
        if section is None or section.__name__ == "AlgorithmSettings":
            yield path
        else:
            yield from keys_of(section, f"{path}.NAME." if "dict[" in str(field.annotation) else f"{path}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation, which may be optional or a mapping's."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def used(root: Path, settings: set[str]) -> set[str]:
    """The settings that a configuration file, a script or a page sets."""
    sources = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "benchmarks").rglob("*.py")]
    sources += [*(root / "demos").rglob("*.*"), *(root / "configs").rglob("*.yaml")]
    text = "\n".join(path.read_text(errors="ignore") for path in sources)
    blocks = [path.read_text() for path in sources if path.suffix == ".yaml"]
    blocks += re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    keys = "\n".join({key for block in blocks for key in nested(yaml.safe_load(block))})
    short = importlib.import_module("evorl.config.yaml").SHORT
    texts = {f"{section}.{name}": section for section, name in short.items()}
    return {
        path
        for path in settings
        if re.search(rf"^{pattern(path)}$", keys, re.MULTILINE)
        or is_set(path, text)
        or is_set(texts.get(path, path), text)
    }


def pattern(path: str) -> str:
    return re.escape(path).replace("NAME", r"\w+")


def nested(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a YAML document, and of what is one level further in."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield f"{prefix}{key}"
        yield from nested(inner, f"{prefix}{key}.")
        if not prefix:
            yield from nested(inner)


def is_set(path: str, text: str) -> bool:
    """True if the text has the key, or one below it, as an override, or within one of its section.

    `replay={capacity: 100}` sets `replay.capacity`, and `environment.kwargs.g=1` sets `environment.kwargs`.
    """
    section, _, name = path.rpartition(".")
    inner = rf"\b{pattern(section)}=\W*\{{[^}}]*\b{name}\W+:|" if section else ""
    return re.search(rf"{inner}(?<![\w.]){pattern(path)}(\.\w+)*=", text) is not None


def items(root: Path) -> int:
    """The number of tests that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts="]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment, check=False)
    return int(re.findall(r"(\d+) tests? collected", done.stdout)[0])


if __name__ == "__main__":
    main()
