"""The interface of two-player games, and a seat's view of one. A: actions of all choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium as gym

from evorl.types.tensors import Flags

Spaces = tuple[gym.Space[Any], gym.Space[Any]]
"""The observation space of either seat, without its mask, and the action space."""


class Turn(NamedTuple):
    """A seat's view when it is to move, or when its game is over; `reward` is what it got since its last move.

    `mask` [A] has the legal actions, or is None in games without masks.
    """

    observation: Any
    mask: Flags | None
    reward: float
    terminated: bool
    truncated: bool

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


class Game(Protocol):
    """One two-player game. `acting` are the seats that are to move; `seen` has each seat's newest turn."""

    acting: tuple[int, ...]
    seen: dict[int, Turn]
    hides: bool
    """True if the game is known to have imperfect information, as card games do."""

    @property
    def totals(self) -> list[float]:
        """The reward of each seat in this episode."""

    def spaces(self) -> Spaces:
        """The spaces of both seats. Raises UserError if evorl cannot play in them."""

    def text(self, seat: int) -> str | None:
        """The position in words or signs, as far as that seat sees it; None if the game gives no text."""

    def reset(self, seed: int) -> None:
        """Begin an episode."""

    def step(self, actions: Mapping[int, Any]) -> None:
        """Move with the acting seats."""

    def close(self) -> None:
        """Close the game."""


def result_of(own: float, others: float) -> float:
    """The result of a seat that got `own` where the other got `others`: 1, 0.5 or 0."""
    return 1.0 if own > others else 0.5 if own == others else 0.0
