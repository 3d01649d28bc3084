"""A league's standings, ratings from its payoff matrix, and the choice of opponents by it.

Axes: K entrants, first the population, then the archive; C candidates, A of them archived. A result counts 1 for a win,
0.5 for a draw and 0 for a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from evorl.types.agents import Agent, Number

Floats = NDArray[np.float64]
ELO = 400 / math.log(10)
"""Points of Elo's scale per unit of log strength: a win is ten times as likely as a loss at 400 points."""
PRIOR = 1.0
"""Drawn games of each entrant against a virtual player of strength 1, so that unbeaten entrants have finite ratings."""
MAX_STEPS = 1_000
LONGEST_STEP = 0.5
"""Largest change of a log strength in one step of the fit, small enough for Newton's method to converge."""
CLOSE = 1e-9
"""Change of all log strengths at which the fit ends."""
DIGITS = 6
"""Decimals of a rating, so that entrants with equal points tie despite rounding errors in the fit."""
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Standings:
    """The payoff matrix after a generation: `points[i][j]` that i has won of `games[i][j]` against j.

    `population` holds the ids of the evaluated agents and `archive` those of archived agents; `archived` holds the
    generation at whose end each of the latter was frozen. `ratings` and their standard `errors` are on Elo's scale, 0
    for the first archived agent.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    population: tuple[Number, ...] = ()
    archive: tuple[Number, ...] = ()
    archived: tuple[Number, ...] = ()
    points: Matrix = ()
    games: Matrix = ()
    ratings: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError if the sizes of the fields differ, since they are read from files."""
        count = len(self.population) + len(self.archive)
        sizes = {len(self.points), len(self.games), len(self.ratings), len(self.errors)}
        sizes |= {len(row) for row in (*self.points, *self.games)}
        if (sizes - {count}) or len(self.archived) != len(self.archive):
            raise ValueError(f"its payoff matrix is not that of {count} entrants")

    def place_of(self, agent: Agent) -> int | None:
        """The place of an agent of the next generation, or else of its parent, among the population."""
        for id in (agent.id, agent.parent):
            if id in self.population:
                return self.population.index(id)
        return None

    def matrices(self) -> tuple[Floats, Floats]:
        """The points and games [K, K]."""
        count = len(self.points)
        points, games = (np.array(matrix, dtype=np.float64) for matrix in (self.points, self.games))
        return points.reshape(count, count), games.reshape(count, count)


def rows(matrix: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))


def ratings(points: Floats, games: Floats, anchor: int) -> tuple[Floats, Floats]:
    """Maximum-likelihood ratings [K] on Elo's scale, 0 for the `anchor`, and their standard errors [K].

    The model of Bradley and Terry, in which i beats j with probability s_i / (s_i + s_j), fitted by damped Newton steps
    in log s. Entrant i has won `points[i, j]` of `games[i, j]` against j, a draw being half a win. Errors are of the
    difference from the anchor, by the observed information.
    """
    log = np.zeros(len(points))
    won = points.sum(1) + PRIOR / 2
    for _ in range(MAX_STEPS):
        expected, information = _moments(log, games)
        step = np.linalg.solve(information, won - expected)
        step *= min(1.0, LONGEST_STEP / max(np.abs(step).max(), CLOSE))
        log = log + step
        if np.abs(step).max() < CLOSE:
            break
    covariance = np.linalg.inv(_moments(log, games)[1])
    variances = np.diag(covariance)
    variance = variances + variances[anchor] - 2 * covariance[:, anchor]
    # Adding 0 turns the -0 of a rounding error into 0.
    return np.round(ELO * (log - log[anchor]), DIGITS) + 0.0, ELO * np.sqrt(np.maximum(variance, 0.0))


def _moments(log: Floats, games: Floats) -> tuple[Floats, Floats]:
    """The expected points [K] of entrants with these log strengths, and the information matrix [K, K]."""
    chance = 1 / (1 + np.exp(log - log[:, None]))
    alone = 1 / (1 + np.exp(-log))
    information = -games * chance * (1 - chance)
    np.fill_diagonal(information, 0.0)
    np.fill_diagonal(information, -information.sum(1) + PRIOR * alone * (1 - alone))
    return (games * chance).sum(1) + PRIOR * alone, information


def expected(points: Floats, games: Floats) -> Floats:
    """Expected results, shrunk towards a draw by one drawn game; 0.5 for entrants that have not met."""
    return np.asarray((points + 0.5) / (games + 1))


MATCHMAKING: Mapping[str, Callable[[Floats, int, int], NDArray[Any]]] = {
    # Prioritised fictitious self-play (Vinyals et al. 2019): by the square of the expected loss.
    "pfsp": lambda result, place, population: (1 - result) ** 2,
    "uniform": lambda result, place, population: np.ones_like(result),
    "latest": lambda result, place, population: np.arange(len(result)) == place,
    "population": lambda result, place, population: np.arange(len(result)) < population,
}
"""The weight [C] of each possible opponent. `latest` is self-play: a copy of the agent as the generation began."""


def opponent_probabilities(matchmaking: str, result: Floats, place: int, population: int) -> Floats:
    """The probability [C] with which each candidate is the opponent of an environment.

    Candidates are the `population`, in which the agent has this `place`, then the archive; `result` [C] is its expected
    result against each.
    """
    weights = MATCHMAKING[matchmaking](result, place, population)
    return np.asarray(weights / weights.sum())
