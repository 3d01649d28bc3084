"""A user's own modules: environments and networks that a configuration names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_from_here(module: str) -> ModuleType:
    """Import a module that may lie in the working directory, where the user launched. Raises ImportError."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(module)
