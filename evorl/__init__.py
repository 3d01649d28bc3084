"""Evolve a population of reinforcement-learning agents on every process that Accelerate starts."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evorl.system.installation import mixed_with

if TYPE_CHECKING:
    from evorl.runs.callbacks import Generation, Stop
    from evorl.runs.loaded import LoadedAgent, load
    from evorl.runs.read import RunRecord, columns, read_run
    from evorl.runs.train import TrainedRun, train

__version__ = "0.1.0"
__all__ = ["Generation", "LoadedAgent", "RunRecord", "Stop", "TrainedRun", "columns", "load", "read_run", "train"]

_PLACES = {
    "Generation": "evorl.runs.callbacks",
    "LoadedAgent": "evorl.runs.loaded",
    "RunRecord": "evorl.runs.read",
    "Stop": "evorl.runs.callbacks",
    "TrainedRun": "evorl.runs.train",
    "columns": "evorl.runs.read",
    "load": "evorl.runs.loaded",
    "read_run": "evorl.runs.read",
    "train": "evorl.runs.train",
}
"""The files of what `evorl` offers: each is imported when it is first asked for, since torch takes seconds."""

if _other := mixed_with(Path(__file__).parent.parent):
    warnings.warn(
        f"{Path(__file__).parent}: holds files of two projects, evorl-accelerate and {_other}, which is another one; "
        "run `pip uninstall evorl evorl-accelerate`, and install the one that you want",
        RuntimeWarning,
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
