"""Plot styles: a colour-blind-safe palette (Okabe & Ito 2008), and marker shapes."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """The style of a kind of mutation: label, colour, plotly `symbol` and matplotlib `marker`."""

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
"""Colours of groups of runs, used cyclically."""


def look(kind: str) -> Look:
    """Return the style of a kind of mutation; user-defined kinds share a separate style."""
    return LOOKS.get(kind, Look(kind, "#56b4e9", "cross", "X"))
