"""Removed settings of earlier revisions: their former defaults, and what replaces them.

A run's `config.yaml` holds every setting, so those of earlier revisions contain these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """A setting that is gone: its former default, and what to do instead."""

    default: Any
    instead: str

    def advice(self, path: str) -> str:
        """The error message after the path of a removed setting: how to resume with it, and its replacement."""
        former = json.dumps(self.default)
        return f"removed; leave it out (to resume a run that sets it, add {path}={former}): {self.instead}"


REMOVED: Mapping[str, Removed] = {
    "run.lock_timeout": Removed(10.0, "a run waits 10 seconds for a process that still uses its directory"),
    "tracking.entity": Removed(None, "set WANDB_ENTITY, which W&B reads"),
    "tracking.group": Removed(None, "set WANDB_RUN_GROUP, which W&B reads"),
    "tracking.job_type": Removed(None, "set WANDB_JOB_TYPE, which W&B reads"),
    "tracking.notes": Removed(None, "set WANDB_NOTES, which W&B reads"),
    "tracking.tags": Removed([], "set WANDB_TAGS, separated by commas, which W&B reads"),
    "evolution.every": Removed(1, "make generations longer by evolution.steps"),
    "evolution.selection.share": Removed(0.25, "set evolution.selection.replace, the share that is replaced"),
    "evolution.architecture.max_convolutions": Removed(6, "mutations add convolutions up to 6"),
    "evolution.architecture.max_kernel": Removed(9, "mutations let kernels grow to 9"),
    "algorithm.weigh_by_staleness": Removed(False, "actors.max_staleness discards gradients that are too old"),
}


def without_removed(data: Mapping[str, Any], *, if_unset: bool = False) -> dict[str, Any]:
    """Return a configuration without removed settings; with `if_unset`, only without those at their former default."""
    found = dict(data)
    for path, removed in REMOVED.items():
        found = _without(found, path.split("."), removed, if_unset)
    return found


def _without(section: dict[str, Any], keys: list[str], removed: Removed, if_unset: bool) -> dict[str, Any]:
    first, *rest = keys
    if first not in section:
        return section
    value = section[first]
    if rest:
        return section | {first: _without(value, rest, removed, if_unset)} if isinstance(value, dict) else section
    if if_unset and value != removed.default:
        return section
    return {key: kept for key, kept in section.items() if key != first}
