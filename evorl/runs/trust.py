"""The permission check before running custom code that a run's configuration names."""

from __future__ import annotations

from evorl.config import AnyConfig
from evorl.types import UserError


def refuse_code(config: AnyConfig, allowed: bool, allow: str = "--allow-code") -> None:
    """Raise UserError if a run's configuration names custom code to import, unless that is `allowed`.

    `allow` is the option that the error message suggests.
    """
    for key, value in (("environment.id", config.environment.id), ("network.factory", config.network.factory or "")):
        if not allowed and ":" in value:
            raise UserError(f"{key}: {value!r} runs code of its own; add {allow} if you trust this run")
