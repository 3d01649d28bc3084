"""Weights & Biases: curves over the environment steps of all agents, and the lineage as a table."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import wandb

from evorl.config import AnyConfig

LINEAGE_COLUMNS = ("generation", "id", "parent", "mutation", "fitness", "architecture", "hyperparameters")


class WeightsAndBiases:
    """One W&B run. Without a key it is an offline one, which `wandb sync` uploads later; it never asks."""

    def __init__(self, config: AnyConfig, directory: Path) -> None:
        settings = config.tracking
        mode: Literal["online", "offline"] | None = None if settings.mode == "auto" else settings.mode
        if settings.mode == "auto" and not os.environ.get("WANDB_MODE"):  # W&B itself heeds the variable.
            mode = "online" if _has_key() else "offline"
        if mode == "offline" and settings.mode == "auto":
            print(f"W&B: no key found, so the run is recorded offline; upload it with `wandb sync {directory}/wandb/*`")
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=directory.name,
            dir=str(directory),
            mode=mode,
            tags=list(settings.tags),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True, init_timeout=60),
        )
        self._run.define_metric("global_steps")
        self._run.define_metric("*", step_metric="global_steps")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "global_steps": step})

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        data = [[_cell(row[column]) for column in LINEAGE_COLUMNS] for row in lineage]
        self._run.log({"lineage": wandb.Table(columns=list(LINEAGE_COLUMNS), data=data)})
        self._run.summary.update(dict(summary))
        self._run.finish()


def _has_key() -> bool:
    """Whether W&B could log in without asking: from the environment, or from what `wandb login` wrote."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return value
