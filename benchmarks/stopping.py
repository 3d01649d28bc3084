"""Simulate the stopping rule; print how often runs stop at an agent below the target, how late, and the reported mean.

    python benchmarks/stopping.py [--runs 400]

A run has 25 generations of four agents that play 10 episodes each; the best challenges the `Elite`, and the target is
tested. Agents are distributions of returns. Runs of the first table have not seen the failures of new agents, so the
worst return is least informative; those of the second have (`known`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import NormalDist, mean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.runs.agents.elite import Elite, Play

Returns = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Returns]
AGENTS, EPISODES, CONFIRMATION, GENERATIONS = 4, 10, 60, 25


class Case(NamedTuple):
    """Identical agents: their return distribution and true mean, the target, a failing agent's return, and the std."""

    draw: Draw
    true: float
    target: float
    worst: float
    std: float


class Outcome(NamedTuple):
    """The outcome of a run: last generation, whether it stopped, reported mean, and number of evaluation episodes."""

    generation: int
    stopped: bool
    reported: float
    episodes: int


class StoppingRule:
    """The rule by which a run chooses its elite and decides to stop."""

    def __init__(self) -> None:
        self._elite = Elite()
        self._number = 0

    def generation(self, agents: Returns, replay: Returns | None, duel: Play, measure: Play, target: float) -> bool:
        """Process the agents' returns [P, N] and the elite's [N] on the same episodes; return True to stop the run."""
        elite = self._elite
        self._number += 1
        elite.note_worst(agents)
        best = agents[agents.mean(1).argmax()]
        won = elite.challenge(best, replay, duel, CONFIRMATION, self._number)
        seems_reached = bool((best if won or replay is None else replay).mean() >= target)
        played = elite.measure(measure, CONFIRMATION if seems_reached else EPISODES, CONFIRMATION)
        return elite.reaches(target, seems_reached, measure, CONFIRMATION, played)

    @property
    def reported(self) -> float:
        """The reported mean of the elite."""
        return self._elite.score.mean if self._elite.score else math.nan

    def see(self, worst: float) -> None:
        """Record the worst return of an agent of an earlier generation."""
        self._elite.note_worst(np.array([worst]))


def students_bound(returns: Returns, error: float) -> float:
    """Return Student's lower bound on the mean (Abramowitz & Stegun 26.7.5), corrected for skewness (Hall 1992)."""
    count, std = len(returns), float(returns.std(ddof=1))
    if std == 0:
        return float(returns.mean())
    z = NormalDist().inv_cdf(1 - error)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    quantile = z + sum(term / (count - 1) ** (power + 1) for power, term in enumerate(terms))
    deviations = returns - returns.mean()
    skew = float((deviations**3).mean() / (deviations**2).mean() ** 1.5) / math.sqrt(count)
    if skew < -1e-9:
        quantile = 3 / skew * (float(np.cbrt(1 + skew * (quantile - skew / 6))) - 1)
    return float(returns.mean() - quantile * std / math.sqrt(count))


def run(case: Case, rng: np.random.Generator, *, known: bool) -> Outcome:
    """Simulate one run of identical agents; `known` is explained in the module docstring."""
    rule, episodes = StoppingRule(), 0

    def played(agents: int, count: int) -> Returns:
        nonlocal episodes
        episodes += agents * count
        return case.draw(rng, agents * count).reshape(agents, count)

    def fresh(agents: int, first: int, count: int) -> Returns:
        return played(agents, count)

    if known:
        rule.see(case.worst)
    number, stops = 0, False
    while number < GENERATIONS and not stops:
        agents = played(AGENTS, EPISODES)
        replay = played(1, EPISODES)[0] if number else None
        duel = partial(fresh, 2 if number else 1)
        stops = rule.generation(agents, replay, duel, partial(fresh, 1), case.target)
        number += 1
    return Outcome(number, stops, rule.reported, episodes)


def crashes(one_in: int) -> Draw:
    """Return the return distribution of a lander that crashes in one of `one_in` landings."""

    def draw(rng: np.random.Generator, count: int) -> Returns:
        fails = rng.random(count) < 1 / one_in
        returns: Returns = np.where(fails, -150.0, rng.normal(250.0, 20.0, count))
        return returns

    return draw


def chosen(values: Sequence[float], shares: Sequence[float]) -> Draw:
    """Return a discrete distribution of returns with these probabilities."""
    return lambda rng, count: rng.choice(np.array(values, dtype=np.float64), size=count, p=shares)


def normal(at: float, std: float) -> Draw:
    """Return a normal distribution of returns."""
    return lambda rng, count: rng.normal(at, std, count)


def gamma(shape: float, scale: float) -> Draw:
    """Return a distribution of negative, gamma-distributed costs, with a heavy tail of bad returns."""
    return lambda rng, count: -rng.gamma(shape, scale, count)


BELOW: Mapping[str, Case] = {
    "normal, 70": Case(normal(215, 70), 215, 220, -300, 70),
    "normal, far below": Case(normal(190, 70), 190, 220, -300, 70),
    "one landing in 10 crashes": Case(crashes(10), 210, 213, -300, 121),
    "one landing in 30 crashes": Case(crashes(30), 250 - 400 / 30, 240, -300, 74),
    "one landing in 60 crashes": Case(crashes(60), 250 - 400 / 60, 245, -300, 55),
    "one landing in 200 crashes": Case(crashes(200), 248, 249, -300, 34),
    "success 0.97, target 0.98": Case(chosen((0, 1), (0.03, 0.97)), 0.97, 0.98, 0, 0.17),
    "success 0.99, target 0.995": Case(chosen((0, 1), (0.01, 0.99)), 0.99, 0.995, 0, 0.1),
    "costs, skewed": Case(gamma(1.0, 150), -150, -145, -1500, 150),
    "scores of -21 to 21": Case(chosen((-21, 17, 19, 21), (0.02, 0.3, 0.38, 0.3)), 18.2, 18.5, -21, 5.8),
    "constant": Case(chosen((500,), (1,)), 500, 501, 9, 0),
}
ABOVE: Mapping[str, Case] = {
    "lander of 250, 30 (target 200)": Case(normal(250, 30), 250, 200, -300, 30),
    "lander of 235, 40 (target 200)": Case(normal(235, 40), 235, 200, -500, 40),
    "one landing in 30 crashes (target 200)": Case(crashes(30), 250 - 400 / 30, 200, -300, 74),
    "constant 500 (target 475)": Case(chosen((500,), (1,)), 500, 475, 9, 0),
    "cart pole of 495 (target 475)": Case(chosen((500, 450), (0.9, 0.1)), 495, 475, 9, 15),
    "success 0.999 (target 0.98)": Case(chosen((0, 1), (0.001, 0.999)), 0.999, 0.98, 0, 0.03),
    "pendulum of -150 (target -200)": Case(gamma(3.5, 43), -150.5, -200, -1600, 80),
    "constant 5 (target 4)": Case(chosen((5,), (1,)), 5, 4, 0, 0),
}


def outcomes(case: Case, runs: int, *, known: bool, seed: int = 0) -> list[Outcome]:
    """Simulate `runs` runs."""
    return [run(case, np.random.default_rng((seed, number)), known=known) for number in range(runs)]


def heading(*cells: str) -> str:
    """Return the header of a Markdown table."""
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    print(heading("agents below the target", "false stops", "reported - true mean, in sd", "episodes in a generation"))
    for name, case in BELOW.items():
        ends = outcomes(case, runs, known=False)
        stops = mean(each.stopped for each in ends)
        bias = mean(each.reported - case.true for each in ends) / (case.std or 1)
        episodes = mean(each.episodes / each.generation for each in ends)
        print(f"| {name} | {stops:.3f} | {bias:+.3f} | {episodes:.0f} |")
    print()
    print(heading("agents above the target", "generations until a stop", "later than the first", "episodes"))
    for name, case in ABOVE.items():
        ends = outcomes(case, runs, known=True)
        generations = mean(each.generation for each in ends)
        later = mean(each.generation > 1 for each in ends)
        print(f"| {name} | {generations:.2f} | {later:.3f} | {median(each.episodes for each in ends):.0f} |")


if __name__ == "__main__":
    main()
