"""Provenance of settings: a file, the command line, an environment, or the default."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from evorl.config.errors import shown

YOURS = "your setting"
DEFAULT = "default"


@dataclass(frozen=True)
class Origins:
    """Provenance of settings by dotted path. All instances compare equal: they are not part of a configuration."""

    file: str = field(default="", compare=False)
    """The file's name."""
    in_file: Collection[str] = field(default=(), compare=False)
    """Settings taken from the file."""
    given: Sequence[str] = field(default=(), compare=False)
    """Settings or sections given as overrides of the file."""
    task: str = field(default="", compare=False)
    """The environment that the file was written for."""
    left_out: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Settings of the file dropped because they only apply to its own environment."""
    found: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Origins of settings that were looked up elsewhere."""

    def is_given(self, key: str) -> bool:
        """Return whether a setting was overridden, alone or with its section."""
        return any(key == path or key.startswith(f"{path}.") for path in self.given)

    def of(self, key: str) -> str:
        """Return a short description of where a setting came from."""
        if key in self.found:
            return self.found[key]
        if self.is_given(key):
            return YOURS
        return self.file if key in self.in_file else DEFAULT

    def with_found(self, key: str, where: str) -> Self:
        """Return a copy that records `where` a setting was looked up."""
        return replace(self, found={**self.found, key: where})

    def omissions(self) -> str:
        """Return one line listing the file's settings that were dropped, or an empty string."""
        if not self.left_out:
            return ""
        each = ", ".join(f"{key} {shown(value)}" for key, value in self.left_out.items())
        return f"left out of {self.file}, since it is for {self.task}: {each}"
