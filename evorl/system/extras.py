"""Optional packages: the modules of each extra, and the command that installs it in this installation."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from evorl.types.outcomes import UserError

EXTRAS: Mapping[str, Sequence[str]] = {
    "atari": ("ale_py",),
    "games": ("pettingzoo", "pygame"),
    "hub": ("huggingface_hub",),
    "jax": ("jax", "gymnax", "brax", "six"),
    "minatar": ("minatar",),
    "mujoco": ("mujoco", "imageio"),
    "onnx": ("onnx", "onnxruntime"),
    "openspiel": ("pyspiel",),
    "plot": ("matplotlib",),
    "report": ("jinja2", "plotly"),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "video": ("av",),
}
"""The modules that evorl imports of each extra of pyproject.toml."""
PROJECT = "evorl-accelerate"
SOURCE = Path(__file__).parent.parent.parent
"""The clone, if evorl is imported from one."""


def install_command(extra: str) -> str:
    """The command that installs an extra: into the clone if evorl runs from one, else into the installed package."""
    if not (SOURCE / "pyproject.toml").is_file():
        return f"pip install '{PROJECT}[{extra}]'"
    location = "." if Path.cwd() == SOURCE else str(SOURCE)
    return f"pip install -e {shlex.quote(f'{location}[{extra}]')}"


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def require(extra: str, what: str) -> None:
    """Raise UserError unless the modules of an extra, which `what` needs, are installed."""
    if names := missing(extra):
        raise UserError(f"{what} needs {' and '.join(names)}; install it with `{install_command(extra)}`")


def extra_needed(error: BaseException) -> str:
    """The install hint for the optional dependency that an import error, or its chain of causes, names; else ""."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            extras = [extra for extra, modules in EXTRAS.items() if cause.name in modules]
            return f"it needs the extra {extras[0]}: {install_command(extras[0])}" if extras else ""
        cause = cause.__cause__
    return ""
