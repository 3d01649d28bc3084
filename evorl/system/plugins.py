"""Import of user modules: environments and networks named by a configuration."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from evorl.config.errors import shown
from evorl.types import UserError

SCRIPT = "__main__:"
"""Prefix of names defined in a script or a notebook."""


def import_from_here(module: str) -> ModuleType:
    """Import a module, also from the working directory of the launch. Raises ImportError."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:
        # Any error of the module itself; relative and empty names raise TypeError and ValueError.
        raise ImportError(f"{type(error).__name__} in {module!r}: {error}") from error


def name_of(factory: Any) -> str:
    """Return the `module:name` by which other processes can import a class or function.

    Raises UserError if it cannot be imported by name.
    """
    module, name = getattr(factory, "__module__", None) or "", getattr(factory, "__qualname__", "")
    if not isinstance(factory, type | FunctionType) or getattr(sys.modules.get(module), name, None) is not factory:
        raise UserError(
            f"environment: {shown(factory)} does not stand at the top of a module or script under its own name, where "
            "other processes and a resumed run could find it"
        )
    return f"{module}:{name}"


def defined_in(module: ModuleType, name: str) -> Any:
    """Return the class or function that a module defines under this name, or None."""
    found = getattr(module, name, None)
    return found if isinstance(found, type) or _is_own_function(found, module) else None


def _is_own_function(found: object, module: ModuleType) -> bool:
    return isinstance(found, FunctionType) and found.__module__ == module.__name__
