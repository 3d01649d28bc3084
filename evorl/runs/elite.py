"""The best agent so far (the elite), and the test of the target: both use only episodes not used for selection.

The maximum of several noisy means is biased upwards, and a test that is repeated every generation is eventually passed
by chance. So an agent becomes the elite on some episodes and is scored on others, and the test is anytime-valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field, FiniteFloat

from evorl.system.console import digits

Number = Annotated[int, Field(ge=0, le=10**15)]
Measured = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A number bounded so that reports can square and sum it without overflow."""
Returns = NDArray[np.float64]
Play = Callable[[int, int], Returns]
"""(first, episodes) -> returns [P, N] of fresh episodes, numbered from `first`: of one agent, or of challenger and
elite on the same episodes."""

STAKES = np.array([0.98, 0.75, 0.5, 0.25, 0.12, 0.06, 0.03])
WEIGHTS = np.array([0.5, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
"""Fractions of the capital to bet, and the share of the initial capital allotted to each. Large stakes are best if
returns vary little compared with their distance from the worst one, the usual case; small stakes cover the others."""
MOST_TESTS = 8
"""The maximum number of test episodes per generation, in multiples of `evaluation.confirmation_episodes`."""
MOST_EPISODES = 10_000
"""The number of returns after which an elite is not measured further; every checkpoint contains them."""


class Score(NamedTuple):
    """Number of episodes, and mean and sample standard deviation (n - 1) of an agent's returns."""

    episodes: int
    mean: float
    std: float

    @classmethod
    def of(cls, returns: ArrayLike) -> Score:
        """Return the score of returns [N], N >= 1; the standard deviation of a single return is 0."""
        values = np.asarray(returns, dtype=np.float64)
        std = float(values.std(ddof=1)) if values.size > 1 else 0.0
        return cls(values.size, float(values.mean()), std)

    @property
    def standard_error(self) -> float:
        return self.std / math.sqrt(self.episodes)

    def described(self, *, fresh: bool = True) -> str:
        """Format as mean ± standard error over the number of episodes. Every ± in the output is a standard error."""
        episodes = f"{'fresh ' if fresh else ''}episode{'' if self.episodes == 1 else 's'}"
        return f"{digits(self.mean)} ± {digits(self.standard_error)} over {self.episodes} {episodes}"


def lower_bound(returns: Sequence[float] | Returns, worst: float, error: float) -> float:
    """Return an anytime-valid lower confidence bound on the mean of returns [N] that are at least `worst`.

    Testing by betting (Waudby-Smith & Ramdas 2024, arXiv 2010.09686): a bettor who stakes fractions of a capital on
    each return exceeding m multiplies it by 1 / `error` with probability at most `error` if the mean is m or less
    (Ville's inequality). The bound is the smallest mean that the bets do not refute. It holds for every distribution,
    however rare its failures, and simultaneously for all numbers of returns: one may look, play further episodes and
    look again.

    Minus infinity without returns.
    """
    values = np.asarray(returns, dtype=np.float64)
    if not values.size:
        return -math.inf
    low, high, wanted = worst, float(values.mean()), -math.log(error)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_capital(values, middle, worst) >= wanted else (low, middle)
    return low


def _log_capital(returns: Returns, mean: float, worst: float, repeated: float = 1.0) -> float:
    """Return the log capital after betting that each of the returns [N] exceeds `mean`, from an initial capital of 1.

    `repeated` counts the same returns that many times.
    """
    if mean <= worst:
        return math.inf
    gains = np.log1p(STAKES[:, None] * (returns - mean) / (mean - worst)).sum(1)
    return float(np.logaddexp.reduce(np.log(WEIGHTS) + repeated * gains))


def error_of_test(total: float, number: int) -> float:
    """Return the error probability allotted to test `number` (from 1); over all tests they sum to `total`."""
    return total / (number * (number + 1))


def play_until_clear(play: Play, part: int, most: int) -> Returns:
    """Play two agents on fresh episodes, `part` at a time, until one is clearly better; return the returns [2, N].

    Stops once the mean difference exceeds twice its standard error, or when `most` episodes would be exceeded.
    """
    played = play(0, part)
    while (have := played.shape[1]) + part <= most:
        difference = Score.of(played[0] - played[1])
        if abs(difference.mean) > 2 * difference.standard_error:
            break
        played = np.concatenate([played, play(have, part)], axis=1)
    return played


@dataclass
class Elite:
    """The best agent so far, which won in generation `generation`.

    `returns` come from episodes that only measure it: none of them selected it or decided a challenge. `worst` is the
    worst return of any agent in the run's evaluations. `tests` counts the elites tested for the target, including this
    one if it `is_tested`; `lower_bound` is then the lower confidence bound on its mean.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    returns: tuple[FiniteFloat, ...] = ()
    generation: Number | None = None
    worst: FiniteFloat | None = None
    tests: Number = 0
    is_tested: bool = False
    lower_bound: FiniteFloat | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent fields, since they are read from files."""
        if self.returns and (self.generation is None or self.worst is None or min(self.returns) < self.worst):
            raise ValueError("an elite with returns has a generation, and none of them is below the worst of the run")
        if self.is_tested and not (self.returns and self.tests):
            raise ValueError("an elite that is tested has returns and is one of those that `tests` counts")

    @property
    def score(self) -> Score | None:
        """The score over its measurement episodes; None if there is no elite yet."""
        return Score.of(self.returns) if self.returns else None

    def see(self, returns: Returns) -> None:
        """Update `worst` from returns of any shape; non-finite entries stand for missing episodes."""
        finite = returns[np.isfinite(returns)]
        if finite.size:
            self.worst = float(finite.min() if self.worst is None else min(self.worst, finite.min()))

    def challenge(
        self, challenger: Returns, elite: Returns | None, play: Play | None, most: int, generation: int
    ) -> bool:
        """Replace the elite by a generation's best agent if that is better; return True if so. The newer wins ties.

        `challenger` and `elite` are returns [N] of both on the generation's episodes; `elite` is None if there is no
        elite yet. If the challenger wins on those, up to `most` fresh episodes of `play` decide. Without `play` the
        generation's episodes alone decide, and also form the score.
        """
        if elite is not None:
            won = challenger.mean() >= elite.mean()
            if won and play is not None:
                ours, theirs = play_until_clear(play, len(challenger), most)
                won = ours.mean() >= theirs.mean()
            if not won:
                if play is None:
                    self._count(elite)
                return False
        self.returns, self.generation, self.is_tested, self.lower_bound = (), generation, False, None
        if play is None:
            self._count(challenger)
        return True

    def measure(self, play: Play | None, episodes: int, enough: int) -> int:
        """Play up to `episodes` further measurement episodes, to at most `enough` in all; return the number played.

        Without `play` that is 0.
        """
        count = min(episodes, enough - len(self.returns))
        if play is None or count <= 0:
            return 0
        self._count(play(0, count)[0])
        return count

    def reaches(
        self, target: float, error: float, seems_reached: bool, play: Play | None, episodes: int, played: int = 0
    ) -> bool:
        """Test whether the true mean return is at least `target`, playing further `episodes` while success is likely.

        The first test of an elite spends a share of the `error`, so it is made only if the target `seems_reached` on
        episodes that do not count towards the score. The elite is then tested in every generation, at no further cost
        (see `lower_bound`). `played` measurement episodes have already been played in this generation.
        """
        if self.score is None or not (seems_reached or self.is_tested):
            return False
        if not self.is_tested:
            self.tests, self.is_tested = self.tests + 1, True
        share, most = error_of_test(error, self.tests), played + MOST_TESTS * episodes
        # Half at a time: continuing is cheap, and surplus episodes are wasted.
        part, is_first = max(1, episodes // 2), True
        while True:
            bound = lower_bound(self.returns, self._floor, share)
            if bound >= target or play is None or played + part > most or len(self.returns) >= MOST_EPISODES:
                break
            if not self._has_hope(target, share, 0 if is_first else most - played):
                break
            self._count(play(played, part)[0])
            played, is_first = played + part, False
        self.lower_bound = bound
        return bound >= target

    @property
    def _floor(self) -> float:
        """The assumed lowest possible return: the worst of the run, but at most 0.

        If no episode of the run has failed yet, its worst return says nothing about a failure.
        """
        return min(self.worst or 0.0, 0.0)

    def _has_hope(self, target: float, error: float, further: int) -> bool:
        """Return True if `further` episodes would pass the test, were returns one standard error better than so far.

        With `further` = 0 it suffices that the mean plus one standard error reaches the target.
        """
        values = np.array(self.returns)
        score = Score.of(values)
        if further == 0:
            return score.mean + score.standard_error >= target
        capital = _log_capital(values + score.standard_error, target, self._floor, 1 + further / len(values))
        return capital >= -math.log(error)

    def _count(self, returns: Returns) -> None:
        self.see(returns)
        if len(self.returns) < MOST_EPISODES:
            self.returns += tuple(map(float, returns))
