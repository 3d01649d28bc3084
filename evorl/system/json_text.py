"""JSON that others may have written."""

from __future__ import annotations

import json
import re
from typing import Any

from evorl.config.plain import check_text, check_whole

SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|[0-9]{19}")
"""Lone surrogates and whole numbers beyond 64 bits look so. Most JSON has neither, and its values need no check."""


def parse_json(payload: bytes) -> Any:
    """Return the value of JSON. Raises ValueError for what is none, or what no run writes.

    That is text with a lone surrogate, which no file or terminal takes, a whole number beyond 64 bits, and brackets
    within each other without end.
    """
    try:
        value = json.loads(payload)
        if SUSPECT.search(payload):
            _check(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _check(value: Any) -> None:
    """Raise ValueError for a lone surrogate or a whole number beyond 64 bits."""
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
