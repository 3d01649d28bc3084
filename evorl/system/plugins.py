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
    try:
        return importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:
        # Whatever the module itself does wrong; relative and empty names raise TypeError and ValueError.
        raise ImportError(f"{type(error).__name__} in {module!r}: {error}") from error
