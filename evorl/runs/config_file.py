"""The configuration file in a run's directory, which every reader of a run opens first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evorl.config import read_yaml
from evorl.system.files import reason, refuse_links_within
from evorl.types import UserError

CONFIG = "config.yaml"


def check_run(run: Path) -> None:
    """Raise UserError if a directory holds no run, or contains links that lead out of it, pipes or devices."""
    try:
        if not (run / CONFIG).is_file():
            raise UserError(f"{run}: there is no run here (no {CONFIG})")
        refuse_links_within(run)
    except OSError as error:
        raise UserError(reason(error, run)) from error


def read_config(run: Path) -> dict[str, Any]:
    """Return a run's configuration as written, not yet validated. Raises UserError like `check_run`."""
    check_run(run)
    return read_yaml(run / CONFIG)
