"""The standings of a league, as checkpoints keep them. Axes: K entrants, first the population, then the archive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from evorl.types.agents import Agent, Number

MAX_ENTRANTS = 4_096
Row = Annotated[tuple[Annotated[float, Field(ge=0, le=1e9)], ...], Field(max_length=MAX_ENTRANTS)]
Matrix = Annotated[tuple[Row, ...], Field(max_length=MAX_ENTRANTS)]
Ids = Annotated[tuple[Number, ...], Field(max_length=MAX_ENTRANTS)]
Ratings = Annotated[tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...], Field(max_length=MAX_ENTRANTS)]


@dataclass(frozen=True)
class Standings:
    """The payoff matrix after a generation: `points[i][j]` that i has won of `games[i][j]` against j.

    `population` holds the ids of the evaluated agents and `archive` those of archived agents; `archived` holds the
    generation at whose end each of the latter was frozen. `ratings` and their standard `errors` are on Elo's scale, 0
    for the first archived agent.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    population: Ids = ()
    archive: Ids = ()
    archived: Ids = ()
    points: Matrix = ()
    games: Matrix = ()
    ratings: Ratings = ()
    errors: Ratings = ()

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent fields, since they are read from files."""
        count = len(self.population) + len(self.archive)
        sizes = {len(self.points), len(self.games), len(self.ratings), len(self.errors)}
        sizes |= {len(row) for row in (*self.points, *self.games)}
        if (sizes - {count}) or len(self.archived) != len(self.archive):
            raise ValueError(f"its payoff matrix is not that of {count} entrants")
        pairs = zip(
            (value for row in self.points for value in row), (n for row in self.games for n in row), strict=True
        )
        if any(value > count for value, count in pairs):
            raise ValueError("an entrant has more points than games")

    def place_of(self, agent: Agent) -> int | None:
        """The place of an agent of the next generation, or else of its parent, among the population."""
        for id in (agent.id, agent.parent):
            if id in self.population:
                return self.population.index(id)
        return None

    def matrices(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The points and games [K, K]."""
        count = len(self.points)
        points, games = (np.array(matrix, dtype=np.float64) for matrix in (self.points, self.games))
        return points.reshape(count, count), games.reshape(count, count)


def rows(matrix: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in matrix)
