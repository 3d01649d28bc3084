"""Checks for optional packages, made before any work that needs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from evorl.types import UserError


def require(extra: str, packages: Sequence[str], what: str) -> None:
    """Raise UserError unless the packages of an extra, which `what` needs, are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {' and '.join(missing)}; install it with `pip install -e '.[{extra}]'`")
