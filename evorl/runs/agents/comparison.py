"""The comparison of evolution with none: each island against its twin, by an exact sign test over islands.

Axes: P agents, I islands, N episodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evorl.config import AnyConfig
from evorl.population.evaluation import Evaluator
from evorl.runs.agents.elite import by_fitness
from evorl.types.agents import Agent

ERROR = 0.05
"""The level of the test, and the error of the interval."""
FEWEST_PAIRS = 6
"""The fewest pairs of islands and twins that can reach it: of five, all higher, two-sided p is 2 / 32."""
Pair = tuple[float | None, float | None]
"""The mean fitness of an island's best agent on fresh episodes, and of its twin's; None where no agent has a
fitness."""


def compare(config: AnyConfig, agents: Sequence[Agent], evaluator: Evaluator, generation: int) -> list[Pair]:
    """Measure the best agent of every island and twin by the fitness of a generation, on the same fresh episodes.

    These episodes select nobody.
    """
    population, episodes = config.population, episodes_of(config)
    best = [max(agents[place], key=by_fitness) for place in population.places]
    means = evaluator.remeasure(best, generation, "comparison", 0, episodes).mean(1).tolist()
    values = [
        mean if agent.fitness is not None and math.isfinite(mean) else None
        for agent, mean in zip(best, means, strict=True)
    ]
    return list(zip(values[: population.islands], values[population.islands :], strict=True))


def episodes_of(config: AnyConfig) -> int:
    """The number of episodes that measure each agent of the comparison."""
    return max(config.evaluation.episodes, config.evaluation.confirmation_episodes)


def comparison_of(pairs: Sequence[Pair], episodes: int) -> dict[str, Any]:
    """The comparison as `summary.json` has it: counts of islands, share, interval, p and the pairs of means.

    `share` is that of the islands in which evolution ended higher than without, among those that differ: ties are left
    out of the test. Its 95 % interval is Clopper and Pearson's (1934, Biometrika 26), which is exact, and `p` that of
    the exact two-sided sign test. All three are None where no island differs. An agent without a fitness is below all
    others.
    """
    low = -math.inf
    values = [[low if mean is None else mean for mean in pair] for pair in pairs]
    higher, lower = (sum(a > b for a, b in values), sum(a < b for a, b in values))
    differing = higher + lower
    return {
        "islands": len(pairs),
        "higher": higher,
        "lower": lower,
        "ties": len(pairs) - differing,
        "share": higher / differing if differing else None,
        "interval": list(share_interval(higher, differing)) if differing else None,
        "p": sign_test(higher, lower) if differing else None,
        "episodes": episodes,
        "pairs": [{"evolved": evolved, "control": control} for evolved, control in pairs],
    }


def sentence(comparison: Mapping[str, Any]) -> str:
    """The comparison in words."""
    ties, differing = comparison["ties"], comparison["higher"] + comparison["lower"]
    tied = f", {ties} {'tie' if ties == 1 else 'ties'} left out" if ties else ""
    islands = "island" if differing == 1 else "islands"
    counts = f"evolution ended higher in {comparison['higher']} of {differing} {islands}{tied}"
    if not differing:
        return f"{counts}: nothing differs from no evolution"
    low, high = comparison["interval"]
    p = comparison["p"]
    counts += f": {comparison['share']:.2f} ({low:.2f} to {high:.2f})"
    if p < ERROR:
        return f"{counts}, {'better' if comparison['higher'] > comparison['lower'] else 'worse'} than none (p {p:.2g})"
    few = f"; it takes {FEWEST_PAIRS} islands that differ" if differing < FEWEST_PAIRS else ""
    return f"{counts}, which could not be distinguished from no evolution (p {p:.2g}){few}"


def sign_test(higher: int, lower: int) -> float:
    """The exact two-sided p value of so many signs, of which both are equally likely."""
    trials = higher + lower
    return min(1.0, 2 * _at_most(min(higher, lower), trials, 0.5))


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's interval of the probability of success, with a coverage of at least 1 - `ERROR`."""
    return 1 - _upper(trials - successes, trials), _upper(successes, trials)


def _upper(successes: int, trials: int) -> float:
    """The largest probability at which so few successes still have the probability `ERROR` / 2, by bisection."""
    low, high = successes / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(successes, trials, middle) > ERROR / 2 else (low, middle)
    return high


def _at_most(successes: int, trials: int, probability: float) -> float:
    """The binomial probability of at most so many successes."""
    return sum(
        math.comb(trials, count) * probability**count * (1 - probability) ** (trials - count)
        for count in range(successes + 1)
    )
