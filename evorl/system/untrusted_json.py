"""Parsing of untrusted JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from evorl.config.yaml import check_text, check_whole

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Matches possible unpaired surrogates."""
ZEROS = bytes.maketrans(b"123456789", b"000000000")
"""Replaces digits by zeros: a regular expression for 19 digits in a row takes longer than parsing."""


def parse_json(payload: bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, and for values that no run writes.

    Those are text with an unpaired surrogate, which no file or terminal accepts, integers beyond 64 bits, and unbounded
    nesting.
    """
    try:
        value = json.loads(payload)
        # Most JSON has neither surrogates nor integers beyond 64 bits, and needs no more checks.
        if SURROGATE.search(payload) or b"0" * 19 in payload.translate(ZEROS):
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
