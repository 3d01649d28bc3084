"""Validation of untrusted text and integers."""

from __future__ import annotations

MAX_WHOLE = 2**63
"""Exclusive bound on the magnitude of integers. Larger ones fit into no array, and printing them may fail."""


def check_text(text: str) -> None:
    """Raise ValueError for text with a lone surrogate, which no file or terminal accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text has a lone surrogate, which stands for no letter") from error


def check_whole(number: int) -> None:
    """Raise ValueError for an integer beyond 64 bits."""
    if not -MAX_WHOLE < number < MAX_WHOLE:
        raise ValueError("a whole number is beyond 64 bits")
