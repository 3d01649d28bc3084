"""The looks of pictures: colours that colour-blind readers can tell apart (Okabe & Ito 2008), and shapes."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """Say how what began with one kind of mutation is drawn: words, colour, symbols of plotly and matplotlib."""

    words: str
    colour: str
    symbol: str
    marker: str


PLAIN = Look("no mutation", "#98a2ad", "circle", "o")
LOOKS = {
    "none": PLAIN,
    "initial": PLAIN,
    "hyperparameters": Look("hyperparameters", "#0072b2", "diamond", "D"),
    "architecture": Look("architecture", "#e69f00", "square", "s"),
    "parameters": Look("parameters (noise)", "#cc79a7", "triangle-up", "^"),
    "activation": Look("activation", "#009e73", "star", "*"),
}
GROUPS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of groups of runs, taken in turn."""


def look(kind: str) -> Look:
    """Return how a kind of mutation is drawn; one that a user added looks unlike all others."""
    return LOOKS.get(kind, Look(kind, "#56b4e9", "cross", "X"))
