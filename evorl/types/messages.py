"""Texts of messages: names, values and errors on one line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


def message_of(error: object, longest: int = 1_000) -> str:
    """The message of an exception on one line, cut after `longest` characters."""
    return " ".join(str(error).split())[:longest]


def on_one_line(text: str, longest: int = 1_000) -> str:
    """Make untrusted text safe for an error message: escape unprintable characters and limit its length."""
    plain = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return plain if len(plain) <= longest else plain[:longest] + "…"


def shown(value: object) -> str:
    """Return a value as quoted in an error message."""
    try:
        return on_one_line(repr(value), 80)
    except (ValueError, RecursionError):
        return f"this {type(value).__name__}"  # Python refuses to format numbers of more than 4300 digits.


def nearest(name: str, names: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the end of an error message: the one of `names` closest to `name`, or all of them."""
    lowered = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    return f"; did you mean {lowered[matches[0]]!r}?" if matches else f"; known: {', '.join(sorted(names))}"
