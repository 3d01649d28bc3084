"""The training programs: each algorithm is trained by one of the demos."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evorl.algorithms import SETTINGS
from evorl.config.yaml import ROOT
from evorl.runs.callbacks import Callback
from evorl.runs.run import Run
from evorl.types import UserError

ONLINE = ROOT / "demos" / "online.py"
ASYNCHRONOUS = ROOT / "demos" / "asynchronous.py"
"""The program for algorithms that learn from actor processes."""


class Main(Protocol):
    """Signature of a demo's `main`."""

    def __call__(self, arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> Run: ...


def program_for(data: Mapping[str, Any]) -> Path:
    """Return the demo that trains with these settings, which it validates itself."""
    section = data.get("algorithm", {})
    name = section.get("name", "dqn") if isinstance(section, dict) else section
    settings = SETTINGS.get(name) if isinstance(name, str) else None
    return ASYNCHRONOUS if settings is not None and settings.sends is not None else ONLINE


def main_of(program: Path) -> Main:
    """Import a program and return its `main`. Raises UserError if `program` is not a Python file."""
    spec = importlib.util.spec_from_file_location(f"evorl_demo_{program.stem}", program)
    if spec is None or spec.loader is None or not program.is_file():
        raise UserError(f"{program}: is no Python program")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Main = module.main
    return main
