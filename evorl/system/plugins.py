"""Import of user modules (environments, networks, opponents), and errors in them with the lines of that code."""

from __future__ import annotations

import importlib
import linecache
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from evorl.types.messages import message_of, shown
from evorl.types.outcomes import UserError

MAX_LETTERS = 300
"""Maximum quoted characters of an error's type and message."""
MAX_SOURCE = 100
"""Maximum quoted characters of a source line."""


def described(error: BaseException) -> str:
    """An error on one line: its type, its message, and the user's code that led to it."""
    return without_place(error) + place(error)


def without_place(error: BaseException) -> str:
    text = message_of(error)
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:MAX_LETTERS]


def place(error: BaseException) -> str:
    """The innermost place in the user's code, ` (env.py:31 in score: return info["reward"])`, or an empty string.

    If an error has none, that of its cause is used.
    """
    linecache.checkcache()
    cause: BaseException | None = error
    while cause is not None:
        if quoted := _innermost(traceback.extract_tb(cause.__traceback__)):
            return quoted
        cause = cause.__cause__
    return ""


def place_in_thread(thread: int) -> str:
    """The innermost place in the user's code that evorl has called in a running thread, as `place` has it."""
    stack = list(traceback.extract_stack(sys._current_frames().get(thread)))
    ours = [index for index, frame in enumerate(stack) if Path(frame.filename).is_relative_to(_EVORL)]
    return _innermost(stack[ours[-1] + 1 :] if ours else stack)


def _innermost(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost frame of the user's code or, without any, of another package, since environments are packages too.

    Frames of evorl, Python and the packages that evorl builds on do not count.
    """
    frames = [frame for frame in stack if not _is_library(frame.filename)]
    frames = [frame for frame in frames if not _is_installed(frame.filename)] or frames
    if not frames:
        return ""
    where = f"{_shown(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"
    line = " ".join((frames[-1].line or "").split())[:MAX_SOURCE]
    return f" ({where}: {line})" if line else f" ({where})"


def _is_library(file: str) -> bool:
    """True if a file belongs to evorl, to Python, or to a package that evorl builds on."""
    if file.startswith("<frozen"):
        return True
    path = Path(file)
    if any(path.is_relative_to(root) for root in _ROOTS):
        return True
    return path.is_relative_to(_STANDARD) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return any(Path(file).is_relative_to(root) for root in site_packages())


def _shown(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _root(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


_EVORL = Path(__file__).parent.parent
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_PACKAGES = ("evorl", "gymnasium", "numpy", "torch", "tensorboard", "wandb")
_DEMOS = _EVORL.parent / "demos"
_ROOTS = [_DEMOS, *(root for root in map(_root, _PACKAGES) if root is not None)]


SCRIPT = "__main__:"
"""Prefix of names defined in a script or a notebook."""


def is_installed(module: str) -> bool:
    """True if the package of a module lies in site-packages; it is not imported. False for `__main__`, the program."""
    if module == "__main__":
        return False
    try:
        spec = find_spec(module.partition(".")[0])
    except ValueError:
        return False
    files = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    return bool(files) and all(map(_is_installed, files))


def import_from_here(module: str) -> ModuleType:
    """Import a module, also from the working directory of the launch unless it is installed. Raises ImportError."""
    if not is_installed(module) and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:
        # Any error of the module itself; relative and empty names raise TypeError and ValueError.
        raise ImportError(f"{type(error).__name__} in {module!r}: {error}") from error


def imported(key: str, path: str, form: str = "package.module:NAME") -> Any:
    """The class or function that the setting `key` names by its `path`, of this form.

    Raises UserError if it cannot be imported or called.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise UserError(f"{key}: {path!r} must have the form {form}")
    try:
        value = getattr(import_from_here(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{key}: cannot import {path!r}: {error}{place(error)}") from error
    if not callable(value):
        raise UserError(f"{key}: {path!r} is not callable")
    return value


def name_of(factory: Any, key: str = "environment") -> str:
    """The `module:name` by which other processes can import a class or function, the value of a setting.

    Raises UserError if it cannot be imported by name.
    """
    module, name = getattr(factory, "__module__", None) or "", getattr(factory, "__qualname__", "")
    if not isinstance(factory, type | FunctionType) or getattr(sys.modules.get(module), name, None) is not factory:
        raise UserError(
            f"{key}: {shown(factory)} is not defined at the top level of a module or script under its own name, "
            "so other processes and a resumed run cannot import it"
        )
    return f"{module}:{name}"


def defined_in(module: ModuleType, name: str) -> Any:
    """The class or function that a module defines under this name, or None."""
    value = getattr(module, name, None)
    is_own = isinstance(value, FunctionType) and value.__module__ == module.__name__
    return value if isinstance(value, type) or is_own else None


def site_packages() -> list[str]:
    """The directories of installed packages, those of the system and the user's own."""
    return [*site.getsitepackages(), site.getusersitepackages()]


def entries(group: str) -> Iterator[EntryPoint]:
    """The entry points of installed packages in this group.

    Only what lies in site-packages is installed: the working directory, which may be on the path, can be a stranger's.
    """
    packages = distributions(path=site_packages())
    return (entry for package in packages for entry in package.entry_points if entry.group == group)


def installed(group: str, name: str, base: type) -> Any:
    """The subclass of `base` that an installed package has as an entry point of this group and name, or None.

    Raises UserError if it cannot be imported or is another object.
    """
    for entry in entries(group):
        if entry.name != name:
            continue
        where = f"algorithm.name: the entry point {group}: {name} = {entry.value}"
        try:
            loaded_class = entry.load()
        except Exception as error:
            raise UserError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(loaded_class, type) or not issubclass(loaded_class, base):
            raise UserError(f"{where} is {shown(loaded_class)}, and no subclass of {base.__name__}")
        return loaded_class
    return None
