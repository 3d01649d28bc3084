"""The best agent so far, and the test of the target: both count only episodes that selected nobody.

The best of several noisy means is too high, and a test that is repeated in every generation is passed by luck in the
end. So an agent becomes the elite by some episodes and is scored on others, and the test holds at any time.
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
"""A number that reports can square and sum up."""
Returns = NDArray[np.float64]
Play = Callable[[int, int], Returns]
"""Plays fresh episodes, numbered from the first argument and as many as the second: returns [P, N] of one agent, or of
challenger and elite on the same episodes."""

STAKES = np.array([0.98, 0.75, 0.5, 0.25, 0.12, 0.06, 0.03])
WEIGHTS = np.array([0.5, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
"""Shares of the capital that are bet, and how much of the capital is bet so. A large stake is best where returns vary
little beside their distance from the worst one, which is the usual case; small ones pay for the others."""
MOST_TESTS = 8
"""The target is tested on up to so many times `evaluation.confirmation_episodes` in one generation."""
MOST_EPISODES = 10_000
"""An elite with so many returns is not measured further; they are part of every checkpoint."""


class Score(NamedTuple):
    """Number, mean and standard deviation (of the sample, with n - 1) of the returns of an agent's episodes."""

    episodes: int
    mean: float
    std: float

    @classmethod
    def of(cls, returns: ArrayLike) -> Score:
        """Return the score of these returns [N], at least one; the deviation of a single one is 0."""
        values = np.asarray(returns, dtype=np.float64)
        std = float(values.std(ddof=1)) if values.size > 1 else 0.0
        return cls(values.size, float(values.mean()), std)

    @property
    def standard_error(self) -> float:
        return self.std / math.sqrt(self.episodes)

    def described(self, *, fresh: bool = True) -> str:
        """Return the mean with its standard error, which is what every ± is, and the number of episodes."""
        episodes = f"{'fresh ' if fresh else ''}episode{'' if self.episodes == 1 else 's'}"
        return f"{digits(self.mean)} ± {digits(self.standard_error)} over {self.episodes} {episodes}"


def lower_bound(returns: Sequence[float] | Returns, worst: float, error: float) -> float:
    """Return a lower confidence bound of the mean of returns [N], none of which can be below `worst`.

    It is the smallest mean that a bettor could not refute: who bets shares of a capital that each return is above m
    multiplies it by 1 / `error` with at most the probability `error` if the mean is m or less (Ville's inequality;
    Waudby-Smith & Ramdas 2024, arXiv 2010.09686). So it holds for every distribution, however rare its disasters are,
    and at all numbers of returns at once: one may look, play further episodes and look again.

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
    """Return the logarithm of the capital after betting on returns [N] that each is above `mean`, from a capital of 1.

    `repeated` plays the same returns as often.
    """
    if mean <= worst:
        return math.inf
    gains = np.log1p(STAKES[:, None] * (returns - mean) / (mean - worst)).sum(1)
    return float(np.logaddexp.reduce(np.log(WEIGHTS) + repeated * gains))


def error_of_test(total: float, number: int) -> float:
    """Return the share of the error that test `number` (from 1) may spend: all of them together spend `total`."""
    return total / (number * (number + 1))


def play_until_clear(play: Play, part: int, most: int) -> Returns:
    """Return returns [2, N] of fresh episodes, played in parts until it is clear which of two agents is better.

    That is where their difference is twice its standard error, or after `most` episodes.
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

    `returns` are those of episodes that only measure it: neither did they select it, nor did it hold its place by them.
    `worst` is the worst return of any agent in the run's evaluations. `tests` counts the elites that were tested for
    the target, this one among them if it `is_tested`; `lower_bound` is then that of its mean.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    returns: tuple[FiniteFloat, ...] = ()
    generation: Number | None = None
    worst: FiniteFloat | None = None
    tests: Number = 0
    is_tested: bool = False
    lower_bound: FiniteFloat | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be true of an elite, since it is read from files."""
        if self.returns and (self.generation is None or self.worst is None or min(self.returns) < self.worst):
            raise ValueError("an elite with returns has a generation, and none of them is below the worst of the run")
        if self.is_tested and not (self.returns and self.tests):
            raise ValueError("an elite that is tested has returns and is one of those that `tests` counts")

    @property
    def score(self) -> Score | None:
        """Return the score of its own episodes; None where there is no elite yet."""
        return Score.of(self.returns) if self.returns else None

    def see(self, returns: Returns) -> None:
        """Note the worst of any agents' returns, in which those that are not finite stand for no episode."""
        finite = returns[np.isfinite(returns)]
        if finite.size:
            self.worst = float(finite.min() if self.worst is None else min(self.worst, finite.min()))

    def challenge(
        self, challenger: Returns, elite: Returns | None, play: Play | None, most: int, generation: int
    ) -> bool:
        """Take over a generation's best agent if it is better, and return whether it is; ties go to the newer.

        `challenger` and `elite` are returns [N] of both on the generation's episodes, and there is no elite yet where
        it has none. Where the challenger wins there, up to `most` fresh episodes of `play` decide. Without `play` the
        generation's episodes decide alone, and are the score too.
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
        """Play so many further `episodes`, as long as there are fewer than `enough`; gives how many were played.

        Without `play` none are.
        """
        count = min(episodes, enough - len(self.returns))
        if play is None or count <= 0:
            return 0
        self._count(play(0, count)[0])
        return count

    def reaches(
        self, target: float, error: float, seems_reached: bool, play: Play | None, episodes: int, played: int = 0
    ) -> bool:
        """Test whether the true mean return is at least `target`, on further `episodes` of `play` while that has hope.

        The first test of an elite uses up a share of the `error`, so it is made only where the target `seems_reached`
        by episodes that do not count; then it is tested in each generation, at no further cost (see `lower_bound`).
        `played` of this generation's episodes have been played before.
        """
        if self.score is None or not (seems_reached or self.is_tested):
            return False
        if not self.is_tested:
            self.tests, self.is_tested = self.tests + 1, True
        share, most = error_of_test(error, self.tests), played + MOST_TESTS * episodes
        # Half at a time: playing on is cheap, and what was played too much is lost.
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
        """Return what an unseen disaster may come to.

        That is at least a return of 0: where no episode of the run has failed yet, its worst one says nothing of it.
        """
        return min(self.worst or 0.0, 0.0)

    def _has_hope(self, target: float, error: float, further: int) -> bool:
        """Return whether so many `further` episodes would reach the target, if returns are a little better than so far.

        That is by a standard error. With no further ones it is enough that the mean reaches it.
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
