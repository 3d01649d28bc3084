"""Errors in a user's own code, such as an environment's, described by the lines of that code."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

MAX_FRAMES = 6
"""Frames of a user's code that are quoted: the outermost and the innermost ones."""
MAX_LETTERS = 300
"""Letters of an error's own text that are quoted."""
MAX_SOURCE = 100
"""Letters of a line of source code that are quoted."""


def described(error: BaseException) -> str:
    """Return an error on one line: its type, its text, and the lines of the user's code that led to it."""
    return without_place(error) + place(error)


def without_place(error: BaseException) -> str:
    """Return the type and the text of an error on one line."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:MAX_LETTERS]


def place(error: BaseException) -> str:
    """Return ` (env.py:12 in step, env.py:31 in score: return info["reward"])`; empty without the user's code.

    Frames stand in the order of calls. Only the last one is quoted with its line.
    """
    frames = user_frames(error)
    if not frames:
        return ""
    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        frames = [*frames[:half], *frames[-half:]]
    calls = ", ".join(f"{_shown(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames)
    line = " ".join((frames[-1].line or "").split())[:MAX_SOURCE]
    return f" ({calls}: {line})" if line else f" ({calls})"


def user_frames(error: BaseException) -> Sequence[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are the user's code, in the order of calls.

    Installed packages are not, except for the frame that raised, unless evorl builds on them. Without a line of the
    user's own, they are: environments are packages, too. Without any, the frames are those of the error's cause.
    """
    linecache.checkcache()
    cause: BaseException | None = error
    while cause is not None:
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not _is_library(frame.filename)]
        if frames:
            own = [frame for frame in frames if not _is_installed(frame.filename)]
            return frames if not own or own[-1] is frames[-1] else [*own, frames[-1]]
        cause = cause.__cause__
    return []


def _is_library(file: str) -> bool:
    """Return whether a file belongs to evorl, to Python, or to a package that evorl builds on."""
    if file.startswith("<frozen"):
        return True
    path = Path(file)
    if any(path.is_relative_to(root) for root in _ROOTS):
        return True
    return path.is_relative_to(_STANDARD) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _shown(file: str) -> str:
    """Return a path as it is reached from the working directory."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _root(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_PACKAGES = ("evorl", "gymnasium", "numpy", "torch", "tensorboard", "wandb")
_DEMOS = Path(__file__).parent.parent.parent / "demos"
_ROOTS = [_DEMOS, *(root for root in map(_root, _PACKAGES) if root is not None)]
