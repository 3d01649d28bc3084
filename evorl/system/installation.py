"""The check that no other distribution has files in the folder of this package.

PyPI's `evorl` is another project, whose package has the same name.
"""

from __future__ import annotations

import warnings
from pathlib import Path

OTHER = "evorl-*.dist-info"
"""The metadata of the other project, beside the package; this one's are of evorl_accelerate."""


def warn_if_mixed(package: Path) -> None:
    """Warn the importer of `package` if another project has installed files into it."""
    if other := mixed_with(package.parent):
        warnings.warn(
            f"{package}: holds files of two projects, evorl-accelerate and the unrelated {other}; "
            "run `pip uninstall evorl evorl-accelerate`, and install the one that you want",
            RuntimeWarning,
            stacklevel=3,
        )


def mixed_with(folder: Path) -> str | None:
    """The name and version of the other project, if it has installed a package `evorl` into `folder`, else None."""
    for found in sorted(folder.glob(OTHER)):
        try:
            owns = any(line.startswith("evorl/") for line in (found / "RECORD").read_text("utf-8").splitlines())
        except (OSError, UnicodeDecodeError):
            continue
        if owns:
            return found.name.removesuffix(".dist-info").replace("-", " ")
    return None
