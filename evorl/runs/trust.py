"""Which code a run names, and whether to execute it: only if this user launched the run here, or allows its code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from evorl.config import AnyConfig
from evorl.config.fields import BENCHMARK
from evorl.config.task import GAMES
from evorl.system.proof import is_signed, sign
from evorl.types import UserError


def custom_code(config: AnyConfig, *, trains: bool) -> dict[str, str]:
    """The settings that name custom code to import, by their paths; strategies only where the run `trains`."""
    names = {
        "environment.id": config.environment.id,
        "network.factory": config.network.factory or "",
        BENCHMARK: "" if config.league is None or not is_function(config.league.benchmark) else config.league.benchmark,
        "evolution.strategy": (config.evolution.strategy or "") if trains else "",
    }
    is_game = names["environment.id"].rpartition(":")[0] in GAMES
    return {key: name for key, name in names.items() if ":" in name and not (is_game and key == "environment.id")}


def is_function(name: str) -> bool:
    """True if an opponent is named like a function, `package.module:player`, and not like a run or a file."""
    return re.fullmatch(r"[\w.]+:[\w.]+", name) is not None


def is_own(run: Path, config: AnyConfig) -> bool:
    """True if this user launched the run here, with the code that its `config` names (`evorl.system.proof`)."""
    if not custom_code(config, trains=True):
        return False
    return is_signed(run, _signed(config))


def sign_code(run: Path, config: AnyConfig) -> None:
    """Write the proof that this user launched the run with the code that its `config` names, if it names any."""
    if custom_code(config, trains=True):
        sign(run, _signed(config))


def _signed(config: AnyConfig) -> dict[str, Any]:
    """The settings that may name code, and what they pass to it."""
    benchmark = "" if config.league is None else config.league.benchmark
    return {
        BENCHMARK: benchmark if is_function(benchmark) else "",
        "environment.id": config.environment.id,
        "environment.kwargs": config.model_dump(mode="json", include={"environment"})["environment"]["kwargs"],
        "network.factory": config.network.factory,
        "evolution.strategy": config.evolution.strategy,
    }


def refuse_code(config: AnyConfig, allowed: bool, *, trains: bool = False) -> None:
    """Raise UserError if a run's configuration names custom code to import, unless that is `allowed`.

    Strategies are imported only where the run `trains`.
    """
    for key, name in custom_code(config, trains=trains).items():
        if not allowed:
            raise UserError(
                f"{key}: {name!r} names custom code to execute; add --allow-code (allow_code=True in Python) if you "
                "trust this run"
            )
