"""Terminal output that tolerates a closed pipe."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from evorl.system.streams import discard
from evorl.types.messages import on_one_line
from evorl.types.outcomes import EvorlWarning

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)
"""Errors of a closed reader: the other end of a pipe or a terminal is gone."""


class Terminal:
    """stderr as a file that never raises: a closed reader, such as `tee` after Ctrl-C, must not end a run."""

    @property
    def encoding(self) -> str:
        """The terminal's encoding, by which tqdm chooses the letters of its bar."""
        return getattr(sys.stderr, "encoding", None) or "ascii"

    def write(self, text: str) -> int:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError as error:
            if error.errno not in GONE:
                return len(text)  # A full disk may have room again for the next line.
            discard(sys.stderr)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write flushes."""

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()


def escape_stdout() -> None:
    """Print characters that the terminal's encoding lacks as escapes, as stderr does, instead of raising."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def digits(value: float) -> str:
    """Format a return or a fitness with a useful number of digits, also below 1."""
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a duration in its largest fitting unit, as in 12 min."""
    if seconds >= 7200:
        hours = seconds / 3600
        return f"{hours:.3g} h" if hours < 100 else f"{hours:,.0f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def compact(number: float) -> str:
    """Format a positive number with three significant digits and a unit prefix, as in 1.25M."""
    number = float(f"{number:.3g}")  # 999,800 is 1M and not 1e+03k.
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def speed(steps_per_second: float) -> str:
    """Format the speed of a population, as in 1,200 steps/s of all agents."""
    return f"{steps_per_second:,.0f} steps/s of all agents"


def has_display() -> bool:
    """True if a window can be opened: on Linux if the environment names a display."""
    names = ("DISPLAY", "WAYLAND_DISPLAY")
    return not sys.platform.startswith("linux") or any(os.environ.get(name) for name in names)


def say(line: str) -> None:
    Terminal().write(f"{line}\n")


@contextlib.contextmanager
def warnings_on_one_line(suffix: str = "") -> Iterator[None]:
    """Print every evorl warning on one line with a suffix, including repeated ones, which Python would drop."""
    usual = warnings.formatwarning

    def line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
        ours = issubclass(category, EvorlWarning)
        return f"warning: {on_one_line(str(message))}{suffix}\n" if ours else usual(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", EvorlWarning, append=True)
        warnings.formatwarning = line
        try:
            yield
        finally:
            warnings.formatwarning = usual


class WarnOnce:
    """Warns of a condition that persists, such as a full disk, once per subject until the subject is reset.

    Silent unless `speaks`: another process then warns.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._reported: set[str] = set()

    def __call__(self, subject: str, message: str) -> None:
        """Warn, unless this subject has been reported since its last reset."""
        if self._speaks and subject not in self._reported:
            self._reported.add(subject)
            warnings.warn(message, EvorlWarning, stacklevel=2)

    def reset(self, subject: str) -> None:
        """Clear the subject, so that its next occurrence is reported again."""
        self._reported.discard(subject)
