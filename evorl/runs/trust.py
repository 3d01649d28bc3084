"""What is asked before code is run that a run's directory names."""

from __future__ import annotations

from evorl.config import AnyConfig
from evorl.types import UserError


def refuse_code(config: AnyConfig, allowed: bool, allow: str = "--allow-code") -> None:
    """Raise UserError where a run's configuration names code of others to run, unless that is `allowed`.

    The error says how to `allow` it.
    """
    for key, value in (("environment.id", config.environment.id), ("network.factory", config.network.factory or "")):
        if not allowed and ":" in value:
            raise UserError(f"{key}: {value!r} runs code of its own; add {allow} if you trust this run")
