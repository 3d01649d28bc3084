"""Where the settings of a configuration came from: a file, the command line, an environment, or their defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from evorl.config.errors import shown

YOURS = "your setting"
DEFAULT = "default"


@dataclass(frozen=True)
class Origins:
    """Where settings came from, by their dotted paths. All origins are equal: they are no part of a configuration."""

    file: str = field(default="", compare=False)
    """The file's name."""
    in_file: Collection[str] = field(default=(), compare=False)
    """The settings that the file has and that hold."""
    given: Sequence[str] = field(default=(), compare=False)
    """The settings, or sections, that were given beside the file."""
    task: str = field(default="", compare=False)
    """The file's own environment."""
    left_out: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The file's settings that hold for its own environment only, where agents train in another one."""
    found: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The origins of settings that were looked up elsewhere."""

    def is_given(self, key: str) -> bool:
        """Return whether a setting was given beside the file, alone or with its section."""
        return any(key == path or key.startswith(f"{path}.") for path in self.given)

    def of(self, key: str) -> str:
        """Return where a setting came from, in a few words."""
        if key in self.found:
            return self.found[key]
        if self.is_given(key):
            return YOURS
        return self.file if key in self.in_file else DEFAULT

    def with_found(self, key: str, where: str) -> Self:
        """Return the same origins, and `where` a setting was found."""
        return replace(self, found={**self.found, key: where})

    def omissions(self) -> str:
        """Return in one line which settings of the file were left out, and for whom they are; empty for none."""
        if not self.left_out:
            return ""
        each = ", ".join(f"{key} {shown(value)}" for key, value in self.left_out.items())
        return f"left out of {self.file}, since it is for {self.task}: {each}"
