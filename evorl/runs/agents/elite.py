"""The best agent so far (the elite), its challenge in each generation, and the test of the target.

The score and the test of the target use only episodes that were not used for selection, unless
`evaluation.confirmation_episodes` is 0. A challenger must win on the generation's episodes and then on fresh ones; in
games, ratings decide. The maximum of several noisy means is biased upwards, and a test that is repeated every
generation is eventually passed by chance. So an agent becomes the elite on some episodes and is scored on others, and
the test is anytime-valid. Axes: P agents, N episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, FiniteFloat

from evorl.config import AnyConfig
from evorl.evolution.selection import note_ranks
from evorl.population.evaluation import Evaluator, Purpose
from evorl.runs.agents.fitness import Fitness
from evorl.system.console import digits
from evorl.system.formats import decode_agents, encode_agents
from evorl.types.agents import Agent, Number

Returns = NDArray[np.float64]
Play = Callable[[int, int], Returns]
"""(first, episodes) -> returns [P, N] of fresh episodes, numbered from `first`: of one agent, or of challenger and
elite on the same episodes."""

ERROR = 0.05
"""The probability, over a whole run, of stopping at an agent whose true mean return is below the target."""
STAKES = np.array([0.98, 0.75, 0.5, 0.25, 0.12, 0.06, 0.03])
WEIGHTS = np.array([0.5, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
"""Fractions of the capital to bet, and the share of the initial capital allotted to each. Large stakes are best if
returns vary little compared with their distance from the worst one, the usual case; small stakes cover the others."""
MOST_TESTS, MOST_TESTS_OF_AGENT = 8, 2
"""The maximum number of test episodes per generation, in multiples of `evaluation.confirmation_episodes`: in all, or
per agent if that is more, since generations of large populations take longer. A test then takes about as long as the
generation that it may save."""
MOST_EPISODES = 10_000
"""The number of returns after which an elite is not measured further; every checkpoint contains them."""


class Score(NamedTuple):
    """Number of episodes, and mean and sample standard deviation (n - 1) of an agent's returns.

    One episode has no standard deviation, and so no standard error.
    """

    episodes: int
    mean: float
    std: float | None

    @classmethod
    def of(cls, returns: ArrayLike) -> Score:
        """The score of returns [N], N >= 1."""
        values = np.asarray(returns, dtype=np.float64)
        std = float(values.std(ddof=1)) if values.size > 1 else None
        return cls(values.size, float(values.mean()), std)

    @property
    def standard_error(self) -> float | None:
        return None if self.std is None or self.episodes == 1 else self.std / math.sqrt(self.episodes)

    def described(self, *, fresh: bool = True, repeats: bool = False) -> str:
        """Format as mean ± standard error over the number of episodes. Every ± in the output is a standard error.

        `repeats` says that episodes which begin together in several copies are identical.
        """
        episodes = f"{'fresh ' if fresh else ''}episode{'' if self.episodes == 1 else 's'}"
        error = "" if self.standard_error is None else f" ± {digits(self.standard_error)}"
        same = " (seeds make no difference)" if repeats else ""
        return f"{digits(self.mean)}{error} over {self.episodes} {episodes}{same}"


def lower_bound(returns: Sequence[float] | Returns, worst: float, error: float) -> float:
    """An anytime-valid lower confidence bound on the mean of returns [N] that are at least `worst`.

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
    """The log capital after betting that each of the returns [N] exceeds `mean`, from an initial capital of 1.

    `repeated` counts the same returns that many times.
    """
    if mean <= worst:
        return math.inf
    gains = np.log1p(STAKES[:, None] * (returns - mean) / (mean - worst)).sum(1)
    return float(np.logaddexp.reduce(np.log(WEIGHTS) + repeated * gains))


def error_of_test(number: int) -> float:
    """The error probability allotted to test `number` (from 1); over all tests they sum to `ERROR`."""
    return ERROR / (number * (number + 1))


def play_until_clear(play: Play, part: int, most: int) -> Returns:
    """Play two agents on fresh episodes, `part` at a time, until one is clearly better; return the returns [2, N].

    Stops once the mean difference exceeds twice its standard error, or when `most` episodes would be exceeded.
    """
    played = play(0, part)
    while (have := played.shape[1]) + part <= most:
        difference = Score.of(played[0] - played[1])
        if difference.standard_error is not None and abs(difference.mean) > 2 * difference.standard_error:
            break
        played = np.concatenate([played, play(have, part)], axis=1)
    return played


@dataclass
class Elite:
    """The best agent so far (the elite): its score, its challenge by each generation's best, its test of the target.

    It won in generation `generation`. `returns` come from episodes that only measure it: none of them selected it or
    decided a challenge. `worst` is the worst return of any agent in the run's evaluations, or a lower mean of training
    episodes. `tests` counts the elites tested for the target, including this one if it `is_tested`; `lower_bound` is
    then the lower confidence bound on its mean. `repeats` is that of `Evaluator`. These fields are in every
    checkpoint's state; the agent has a file of its own there.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    returns: tuple[FiniteFloat, ...] = ()
    generation: Number | None = None
    worst: FiniteFloat | None = None
    tests: Number = 0
    is_tested: bool = False
    lower_bound: FiniteFloat | None = None
    repeats: bool | None = None

    def __post_init__(self) -> None:
        self.payload: bytes = b""
        """The agent, encoded as a file of one agent; empty before there is one."""

    @property
    def score(self) -> Score | None:
        """The score over its measurement episodes; None if there is no elite yet."""
        return Score.of(self.returns) if self.returns else None

    def facts(self) -> dict[str, float | None]:
        """Its score and the lower bound on its mean, as a line of metrics and the summary have them."""
        score = self.score
        return {
            "elite_fitness": score.mean if score else None,
            "elite_std": score.std if score else None,
            "elite_episodes": score.episodes if score else 0,
            "elite_lower_bound": self.lower_bound,
        }

    def has_reached(self, config: AnyConfig) -> bool:
        """True if the target is reached: by the mean's lower bound, or by the mean where no fresh episodes are played.

        The bound holds for all targets at once, also for one that has been lowered since.
        """
        # Beside twins the target is not tested.
        target = None if config.population.control else config.training.target_fitness
        reached = self.lower_bound
        if not config.evaluation.confirmation_episodes and self.score:
            reached = self.score.mean
        return target is not None and reached is not None and reached >= target

    def forget(self) -> None:
        """Discard its returns; it stays the elite."""
        self.returns, self.is_tested, self.lower_bound = (), False, None

    def forget_episodes(self) -> None:
        """Discard all that is known of returns: they are of another environment, limit on episodes, or opponent."""
        self.forget()
        self.worst = self.repeats = None

    def note_worst(self, returns: Returns) -> None:
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
        self._crown(challenger, play is None, generation)
        return True

    def _crown(self, challenger: Returns, counts: bool, generation: int) -> None:
        """Begin the score of a new elite, with the returns [N] of the generation's episodes if these `counts`."""
        self.returns, self.generation, self.is_tested, self.lower_bound = (), generation, False, None
        if counts:
            self._count(challenger)

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
        self,
        target: float,
        seems_reached: bool,
        play: Play,
        episodes: int,
        played: int = 0,
        agents: int = 1,
    ) -> bool:
        """Test whether the true mean return is at least `target`, playing further `episodes` while success is likely.

        The first test of an elite spends a share of `ERROR`, so it is made only if the target `seems_reached` on
        episodes that do not count towards the score. The elite is then tested in every generation, at no further cost
        (see `lower_bound`). `played` measurement episodes have already been played in this generation; `agents` is the
        size of the population.
        """
        if self.score is None or not (seems_reached or self.is_tested):
            return False
        if not self.is_tested:
            self.tests, self.is_tested = self.tests + 1, True
        share = error_of_test(self.tests)
        most = played + max(MOST_TESTS, MOST_TESTS_OF_AGENT * agents) * episodes
        # Half at a time: continuing is cheap, and surplus episodes are wasted.
        part, is_first = max(1, episodes // 2), True
        while True:
            bound = lower_bound(self.returns, self._floor, share)
            if bound >= target or played + part > most or len(self.returns) >= MOST_EPISODES:
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
        """True if the test would pass after `further` episodes if the mean were one standard error better.

        With `further` = 0 it suffices that the mean plus one standard error reaches the target.
        """
        values = np.array(self.returns)
        score = Score.of(values)
        luck = score.standard_error or 0.0
        if further == 0:
            return score.mean + luck >= target
        capital = _log_capital(values + luck, target, self._floor, 1 + further / len(values))
        return capital >= -math.log(error)

    def _count(self, returns: Returns) -> None:
        self.note_worst(returns)
        if len(self.returns) < MOST_EPISODES:
            self.returns += tuple(map(float, returns))

    def compete(
        self, config: AnyConfig, agents: Sequence[Agent], fitness: Fitness, evaluator: Evaluator, generation: int
    ) -> bool:
        """Assign the `fitness` [P] to the agents, and let the best one challenge the elite.

        An agent's is None if it is not finite or a fault stopped the agent's training.

        The elite plays the generation's episodes, and so does the best agent unless evaluation has played them with it.
        If the elite loses, both play fresh episodes. The winner is then measured, and tested for the target, on
        separate episodes. Returns True if the target is reached.
        """
        for agent, value in zip(agents, fitness.mean, strict=True):
            agent.fitness = float(value) if np.isfinite(value) and agent.fault is None else None
        for population in config.population.places:
            note_ranks(agents[population], config.evolution)
        self.note_worst(fitness.seen)
        leader = max(range(len(agents)), key=lambda index: by_fitness(agents[index]))
        best, episodes, confirms = agents[leader], config.evaluation.episodes, config.evaluation.confirmation_episodes
        elite = decode_agents(self.payload, "the elite") if self.payload else []
        players = [best, *elite] if fitness.evaluated is None else elite
        play = self._play(evaluator, players, generation, "generation")
        played = play(0, episodes) if players else np.zeros((0, episodes))
        if fitness.evaluated is not None:
            played = np.concatenate([fitness.evaluated[leader : leader + 1], played])
        if fitness.elite is None:
            fresh = self._play(evaluator, [best, *elite], generation, "confirmation") if confirms else None
            defended = played[1] if elite else None
            won = best.fitness is not None and self.challenge(played[0], defended, fresh, confirms, generation)
        else:
            # Both have played the same matches, so ratings decide; the newer wins ties.
            won = best.fitness is not None and not best.fitness < fitness.elite
            if won:
                self._crown(played[0], not confirms, generation)
            elif elite and not confirms:
                self._count(played[1])
        solved = False
        if won or elite:
            now, returns = ([best], played[0]) if won else (elite, played[1])
            solved = self._test(config, now, returns, evaluator, generation, agents)
        if won and self.score:
            # Store the measured mean: the mean over the episodes that selected it is biased upwards. Later episodes do
            # not change it, since the file would change with it in each generation.
            self.payload = encode_agents([replace(best, fitness=self.score.mean)])
        self.repeats = evaluator.repeats
        return solved

    def _test(
        self,
        config: AnyConfig,
        elite: Sequence[Agent],
        played: Returns,
        evaluator: Evaluator,
        generation: int,
        population: Sequence[Agent],
    ) -> bool:
        """Measure the elite, which has `played` [N] the generation's episodes; return True if it reaches the target."""
        # Beside twins the run goes on in any case, and the test may take thousands of episodes.
        target, settings = None if config.population.control else config.training.target_fitness, config.evaluation
        confirms = settings.confirmation_episodes
        seems_reached = target is not None and bool(played.mean() >= target)
        play = self._play(evaluator, elite, generation, "measurement") if confirms else None
        # Play all episodes when the target is tested: stopping after a bad start would bias those means low.
        wanted, repeated = confirms if seems_reached else settings.episodes, evaluator.repeats
        count = self.measure(play, wanted, confirms)
        if evaluator.repeats and not repeated:
            # These episodes were the first to show it.
            self.forget()
            count = self.measure(play, wanted, confirms)
        if target is None or play is None:
            return self.has_reached(config)
        return self.reaches(target, seems_reached, play, confirms, count, len(population))

    def _play(self, evaluator: Evaluator, agents: Sequence[Agent], generation: int, purpose: Purpose) -> Play:
        def play(first: int, episodes: int) -> Returns:
            returns = evaluator.remeasure(agents, generation, purpose, first, episodes)
            self.note_worst(returns)
            return returns

        return play


def by_fitness(agent: Agent) -> tuple[bool, float, int]:
    """The sort key of an agent: by fitness, and among equals by id, so that the newest comes last."""
    return agent.fitness is not None, agent.fitness or 0.0, agent.id
