"""Parsing of untrusted JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from evorl.config.yaml import check_text, check_whole

SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|[0-9]{19}")
"""Matches possible unpaired surrogates and integers beyond 64 bits. Most JSON has neither and needs no more checks."""


def parse_json(payload: bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, and for values that no run writes.

    Those are text with an unpaired surrogate, which no file or terminal accepts, integers beyond 64 bits, and unbounded
    nesting.
    """
    try:
        value = json.loads(payload)
        if SUSPECT.search(payload):
            _check(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _check(value: Any) -> None:
    """Raise ValueError for an unpaired surrogate or an integer beyond 64 bits."""
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, int):
        check_whole(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_text(key)
            _check(inner)
    elif isinstance(value, list):
        for inner in value:
            _check(inner)
