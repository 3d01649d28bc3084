"""The settings that are sent to trackers."""

from __future__ import annotations

from typing import Any

from evorl.config import AnyConfig
from evorl.config.errors import shown
from evorl.config.removed import REMOVED
from evorl.types import UserError


def shared_settings(config: AnyConfig) -> dict[str, Any]:
    """Return all settings except those in `tracking.exclude`. Raises UserError if that names an unknown setting."""
    settings: dict[str, Any] = config.model_dump(mode="json")
    for path in config.tracking.exclude:
        if path in REMOVED:
            continue
        *sections, key = path.split(".")
        section: Any = settings
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or key not in section:
            raise UserError(f"tracking.exclude: there is no setting {shown(path)} to leave out")
        del section[key]
    return settings
