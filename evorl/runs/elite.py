"""The best agent so far, and the test of the target: both use episodes that did not select the agent.

The best of several noisy means is too high, and a test that is repeated in every generation is passed by luck in the
end. So a candidate is measured again on fresh episodes, only those count for it, and the probability of stopping too
early is spent over all tests of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field

from evorl.config.fields import Finite

Number = Annotated[int, Field(ge=0, le=10**15)]
Measured = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A number that reports can square and sum up."""


class Score(NamedTuple):
    """Number, mean, standard deviation (of the sample) and skewness of the returns of an agent's episodes."""

    episodes: Annotated[int, Field(ge=1, le=10**15)]
    mean: Finite
    std: Annotated[Finite, Field(ge=0)]
    skewness: Finite = 0.0

    @classmethod
    def of(cls, returns: ArrayLike) -> Score:
        """Return the score of these returns [N]."""
        values = np.asarray(returns, dtype=np.float64)
        deviations = values - values.mean()
        return _score(values.size, float(values.mean()), *(float((deviations**power).sum()) for power in (2, 3)))

    def merged(self, other: Score) -> Score:
        """Return the score of both sets of episodes together (Pebay 2008, Sandia report SAND2008-6212)."""
        (n, squares, cubes), (m, more_squares, more_cubes) = self._sums(), other._sums()
        total, change = n + m, other.mean - self.mean
        cubes += more_cubes + change**3 * n * m * (n - m) / total**2
        cubes += 3 * change * (n * more_squares - m * squares) / total
        return _score(total, self.mean + change * m / total, squares + more_squares + change**2 * n * m / total, cubes)

    def lower_bound(self, error: float) -> float:
        """Return what the true mean is above with probability 1 - `error`; minus infinity for a single episode.

        Student's t quantile by its expansion about the normal one (Abramowitz & Stegun 1964, 26.7.5), corrected where a
        few disasters pull the mean down (Hall 1992): without it a bound over 60 landings, of which one in ten is a
        crash, fails in 6 % of cases instead of 2.5.
        """
        freedom = self.episodes - 1
        if freedom < 1:
            return -math.inf
        z = NormalDist().inv_cdf(1 - error)
        terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        quantile: float = z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
        skew = self.skewness / math.sqrt(self.episodes)
        if skew < -1e-9:
            quantile = 3 / skew * (float(np.cbrt(1 + skew * (quantile - skew / 6))) - 1)
        return self.mean - quantile * self.std / math.sqrt(self.episodes)

    def _sums(self) -> tuple[int, float, float]:
        """Return the number of episodes, and the sums of their deviations' squares and cubes."""
        squares = self.std**2 * (self.episodes - 1)
        return self.episodes, squares, self.skewness * self.episodes * (squares / self.episodes) ** 1.5


def _score(episodes: int, mean: float, squares: float, cubes: float) -> Score:
    """Return the score whose deviations have these sums of squares and cubes."""
    variance = max(squares, 0.0) / episodes
    skewness = cubes / episodes / variance**1.5 if variance > 1e-12 * (1 + mean**2) else 0.0
    return Score(episodes, mean, math.sqrt(max(squares, 0.0) / max(episodes - 1, 1)), skewness)


def error_of_test(total: float, number: int) -> float:
    """Return the share of the error that test `number` (from 1) may spend: all of them together spend `total`."""
    return total / (number * (number + 1))


Returns = NDArray[np.float64]
Play = Callable[[int, int], Returns]
"""Plays fresh episodes, numbered from the first argument and as many as the second: returns [P, N] of one agent, or of
challenger and elite on the same episodes."""


def play_until_clear(play: Play, part: int, most: int) -> Returns:
    """Return returns [P, N] of fresh episodes, played in parts until it is clear which of two agents is better.

    That is where their difference is twice its standard error, or after `most` episodes. A single agent plays one part.
    """
    played = play(0, part)
    while len(played) > 1 and (have := played.shape[1]) + part <= most:
        difference = Score.of(played[0] - played[1])
        if abs(difference.mean) > 2 * difference.std / math.sqrt(have):
            break
        played = np.concatenate([played, play(have, part)], axis=1)
    return played


@dataclass
class Elite:
    """The best agent so far. `score` pools its episodes; those that made it a candidate do not count.

    `tests` counts the generations in which the target seemed to be reached, `lower_bound` is that of the last one.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    score: Score | None = None
    generation: Number | None = None
    tests: Number = 0
    lower_bound: Annotated[float, Field(lt=math.inf)] | None = None

    def note(self, score: Score) -> None:
        """Pool further episodes of the elite with those it has."""
        self.score = score if self.score is None else self.score.merged(score)

    def challenge(
        self, challenger: Returns, elite: Returns | None, play: Play | None, most: int, generation: int
    ) -> bool:
        """Take over a generation's best agent if it is better, and return whether it is; ties go to the newer.

        `challenger` and `elite` are returns [N] of both on the generation's episodes. Where the challenger wins there,
        up to `most` fresh episodes of `play` decide, and count instead of those that chose it.
        """
        if elite is not None:
            self.note(Score.of(elite))
            if challenger.mean() < elite.mean():
                return False
        if play is not None:
            challenger, *others = play_until_clear(play, len(challenger), most)
            for fresh in others:
                self.note(Score.of(fresh))
                if challenger.mean() < fresh.mean():
                    return False
        self.score, self.generation = Score.of(challenger), generation
        return True

    def reaches(self, target: float, error: float, seems_reached: bool, play: Play | None, episodes: int) -> bool:
        """Test whether the true mean return is at least `target`, after so many further `episodes` of `play`.

        A test uses up its share of the `error` even if it fails, so it is made only where the target `seems_reached`
        by episodes that do not count here.
        """
        if self.score is None or not seems_reached:
            return False
        self.tests += 1
        if play is not None and self.score.mean + 2 * self.score.std / math.sqrt(self.score.episodes) >= target:
            self.note(Score.of(play(0, episodes)[0]))
        bound = self.score.lower_bound(error_of_test(error, self.tests))
        self.lower_bound = bound if math.isfinite(bound) else None
        return bound >= target
