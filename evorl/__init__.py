"""Evolve a population of reinforcement-learning agents on every process that Accelerate starts."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}
"""The modules of the public names: each is imported when it is first asked for, since torch takes seconds."""
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
