"""Print the analysis of the paired experiment of docs/protocols.md from benchmarks/data.

    python benchmarks/experiments/paired_evidence.py [--data benchmarks/data/selection.jsonl.gz] [--figure docs/selection.png]

Runs of two arms with the same seed have the same founders and form a pair. The primary comparisons have a sign-flip
test of the mean paired difference, with Holm's correction over those of all tasks in the file; the others are secondary
and have none. Arms and pairs may be missing: a test takes what is there, and only the looks after 20 and 40 pairs
decide.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from evidence_data import Line, normalised, read, score, scores_of, trials_of
from score_statistics import Array, Estimate, bootstrap, probability_of_improvement, worth_in_trials
from score_tests import holm, sign_flip_power, sign_flip_test

sys.path.append(str(Path(__file__).parents[1]))
from records import DATA

PRIMARY = (("selection", "pool"), ("pbt_late", "pool"))
"""The primary comparisons: an arm, and the arm that it is compared with."""
SECONDARY = (("pbt", "pool"), ("pbt_late", "selection"), ("pbt_late", "pbt"))
LOOKS = {20: 0.005, 40: 0.048}
"""The level of each look by its number of pairs, for an error of 5 % over both (O'Brien and Fleming 1979)."""
TRUE = 0.7
"""The true probability of improvement for which the power is given."""
FAMILY = 2
"""The number of primary comparisons of a protocol: of two arms on one task, or of one arm on two tasks."""
Comparison = tuple[str, str]
"""An arm, and the arm that it is compared with."""
Pairs = Array
"""Scores of paired runs [pairs, 2]: the arm's, and those of the arm it is compared with."""
Statistic = Callable[[Pairs], float]


def pairs_of(ours: Sequence[Line], theirs: Sequence[Line]) -> Pairs:
    """Return the scores of the runs whose seeds both arms have, in the order of seeds."""
    by_seed = [{line["seed"]: score(line) for line in lines} for lines in (ours, theirs)]
    common = sorted(by_seed[0].keys() & by_seed[1].keys())
    return np.array([[arm[seed] for arm in by_seed] for seed in common]).reshape(-1, 2)


def paired_improvement(pairs: Pairs) -> float:
    """Return the share of pairs in which the arm scores higher; ties count half."""
    return float(np.mean((pairs[:, 0] > pairs[:, 1]) + 0.5 * (pairs[:, 0] == pairs[:, 1])))


def unpaired_improvement(pairs: Pairs) -> float:
    """Return the probability of improvement over all combinations of runs, as in docs/evidence.md."""
    return probability_of_improvement([pairs[:, 0]], [pairs[:, 1]])


def differences(pairs: Pairs) -> Array:
    result: Array = pairs[:, 0] - pairs[:, 1]
    return result


def mean_difference(pairs: Pairs) -> float:
    return float(differences(pairs).mean())


def tested(pairs: Pairs) -> float:
    """Return the p of the sign-flip test; its random flips have a fixed seed, so that all tables show the same p."""
    return sign_flip_test(differences(pairs), np.random.default_rng(0))


def without_pilots(arms: Mapping[str, Sequence[Line]], pool: str = "pool") -> dict[str, Sequence[Line]]:
    """Leave out the pools whose founders no other arm has: those of pilots."""
    paired = {line["seed"] for arm, lines in arms.items() if arm != pool for line in lines}
    return {arm: [line for line in lines if line["seed"] in paired] for arm, lines in arms.items()}


def comparisons(arms: Mapping[str, Sequence[Line]]) -> dict[Comparison, Pairs]:
    """Return the pairs of each comparison for which there are at least two."""
    found: dict[Comparison, Pairs] = {}
    for arm, over in (*PRIMARY, *SECONDARY):
        pairs = pairs_of(arms.get(arm, ()), arms.get(over, ()))
        if len(pairs) >= 2:
            found[arm, over] = pairs
    return found


def adjusted_p(
    found: Mapping[Comparison, Pairs], elsewhere: Sequence[Pairs], count: int | None = None
) -> dict[Comparison, tuple[float, float]]:
    """Return the p of each primary comparison over its first `count` pairs, and the same with Holm's correction.

    The correction is over the protocol's two primary comparisons: two arms on one task, or two tasks (`elsewhere`).
    A comparison that lacks pairs is left out.
    """
    enough = 2 if count is None else count
    p = {name: tested(found[name][:count]) for name in PRIMARY if name in found and len(found[name]) >= enough}
    others = {("", str(index)): tested(each[:count]) for index, each in enumerate(elsewhere) if len(each) >= enough}
    adjusted = holm({**p, **others}, max(FAMILY, len(p) + len(others)))
    return {name: (value, adjusted[name]) for name, value in p.items()}


def comparison_table(
    found: Mapping[Comparison, Pairs], elsewhere: Sequence[Pairs], rng: np.random.Generator
) -> Iterator[str]:
    """Yield per comparison the probabilities of improvement, the mean difference, and for the primary ones a test."""
    p = adjusted_p(found, elsewhere)
    yield f"| arm | over | pairs | paired | unpaired | mean difference | p | Holm's p | power at {TRUE} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (arm, over), pairs in found.items():
        cells = [
            shown(over_pairs(statistic, pairs, rng))
            for statistic in (paired_improvement, unpaired_improvement, mean_difference)
        ]
        if (arm, over) in p:
            power = sign_flip_power(len(pairs), TRUE, LOOKS[max(LOOKS)], rng)
            cells += [*(f"{value:.4f}" for value in p[arm, over]), f"{power:.2f}"]
        else:
            cells += ["", "", ""]
        yield f"| `{arm}` | `{over}` | {len(pairs)} | " + " | ".join(cells) + " |"


def over_pairs(statistic: Statistic, pairs: Pairs, rng: np.random.Generator) -> Estimate:
    """Return a statistic with its bootstrap interval over pairs."""
    return bootstrap(lambda resampled: statistic(resampled[0]), [pairs], rng=rng)


def look_table(found: Mapping[Comparison, Pairs], elsewhere: Sequence[Pairs] = ()) -> Iterator[str]:
    """Yield the result of each look whose number of pairs a primary comparison has, on its first pairs by seed."""
    yield "| look | arm | over | p | Holm's p | level | distinguished |"
    yield "|---|---|---|---|---|---|---|"
    for count, level in LOOKS.items():
        for (arm, over), (p, adjusted) in adjusted_p(found, elsewhere, count).items():
            verdict = "yes" if adjusted < level else "no"
            yield f"| {count} | `{arm}` | `{over}` | {p:.4f} | {adjusted:.4f} | {level} | {verdict} |"


def return_table(arms: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Yield the mean returns over fresh episodes of each arm's runs, and their cost."""
    yield "| arm | runs | mean return | median | lowest | highest | evaluation steps, millions | CPU seconds, median |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm, lines in arms.items():
        if lines:
            returns = np.array([line["held_out"]["mean"] for line in lines])
            steps = np.mean([line["evaluation_steps"][-1] for line in lines]) / 1e6
            cpu = np.median([line["cpu_seconds"] for line in lines])
            low, middle, high = np.quantile(returns, (0, 0.5, 1))
            cells = f"{returns.mean():.1f} | {middle:.1f} | {low:.1f} | {high:.1f} | {steps:.2f} | {cpu:.0f}"
            yield f"| `{arm}` | {len(lines)} | {cells} |"


def worth_table(arms: Mapping[str, Sequence[Line]], rng: np.random.Generator) -> Iterator[str]:
    """Yield the number of random trials that each arm is worth, by the agents of all pools."""
    yield "| arm | runs | mean score | worth in random trials |"
    yield "|---|---|---|---|"
    pools = trials_of(line for line in arms.get("pool", ()) if "members" in line)
    for arm, lines in arms.items():
        if len(pools) >= 2 and len(lines) >= 2:
            worth = worth_in_trials(scores_of(lines), pools, rng=rng)
            cells = f"{worth.value:.0f} ({worth.low:.0f} to {worth.high:.0f})"
            yield f"| `{arm}` | {len(lines)} | {scores_of(lines).mean():.2f} | {cells} |"


FIGURE = (
    ("evidence", "cartpole", "low", "low_pool", 8, "CartPole, founders with a tenth of the learning rate"),
    ("wide", "lunar_lander_less_wide", "pbt_late", "pool", 40, "LunarLander, seven wide ranges"),
    ("selection", "lunar_lander", "pbt_late", "pool", 40, "LunarLander, four ranges"),
    ("wide", "acrobot_wider", "pbt_late", "pool", 40, "Acrobot, seven wide ranges"),
)
"""The points of the figure: the file of the runs, the task, both arms, the pairs of its protocol, and the label. A
point that lacks pairs is left out."""


def success_share(pools: Sequence[Line]) -> float:
    """Return the share of the agents of pools that solve the task.

    Where agents were not scored one by one, the pool's best must have failed, and so have all.
    """
    shares = []
    for line in pools:
        scores = normalised(line["members"], line["task"]) if "members" in line else np.array([score(line)])
        if "members" not in line and scores[0] >= 1:
            raise ValueError(f"pool {line['seed']} of {line['task']} succeeded, and its other agents have no scores")
        shares.append(np.mean(scores >= 1))
    return float(np.mean(shares))


def draw(path: Path, rng: np.random.Generator) -> None:
    """Draw the probability of improvement over random search against the share of random trials that succeed."""
    from matplotlib.figure import Figure  # The tables need no matplotlib.

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for index, (file, task, arm, over, count, label) in enumerate(FIGURE):
        runs = read(DATA / f"{file}.jsonl.gz")
        arms = without_pilots({name: runs.get((task, name), ()) for name in (arm, over)}, over)
        pairs = pairs_of(arms[arm], arms[over])
        if len(pairs) < count:
            continue
        paired, share = over_pairs(paired_improvement, pairs, rng), success_share(arms[over])
        label = f"{label} ({len(pairs)} pairs)"
        errors = [[paired.value - paired.low], [paired.high - paired.value]]
        axes.errorbar(100 * share, paired.value, errors, fmt="o", capsize=3, color=f"C{index}", label=label)
    axes.axhline(0.5, color="0.7", linewidth=1)
    axes.set(
        xlabel="random trials that solve the task (%)", ylabel="probability of improvement\nover random search, paired"
    )
    axes.set_ylim(0.3, 1.03)
    axes.legend(loc="lower left", fontsize="small", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def analysis(
    arms: Mapping[str, Sequence[Line]], rng: np.random.Generator, elsewhere: Sequence[Pairs] = ()
) -> Iterator[str]:
    """Yield all tables of one task; `arms` are its runs by arm, `elsewhere` the primary comparisons of other tasks."""
    found = comparisons(arms)
    tables = comparison_table(found, elsewhere, rng), look_table(found, elsewhere), return_table(arms)
    for table in (*tables, worth_table(arms, rng)):
        yield from table
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "selection.jsonl.gz")
    parser.add_argument("--figure", type=Path, help="draw all experiments to this file instead of printing one")
    parsed = parser.parse_args()
    if parsed.figure:
        draw(parsed.figure, np.random.default_rng(0))
        return
    if not parsed.data.is_file():
        raise SystemExit(f"{parsed.data}: there is no such file")
    runs = read(parsed.data)
    tasks = {
        task: without_pilots({arm: lines for (of, arm), lines in runs.items() if of == task})
        for task in sorted({task for task, _ in runs})
    }
    primary = {
        task: [pairs for name, pairs in comparisons(arms).items() if name in PRIMARY] for task, arms in tasks.items()
    }
    for task, arms in tasks.items():
        if any(arms.values()):
            elsewhere = [pairs for other, every in primary.items() if other != task for pairs in every]
            print(f"{task}\n")
            print("\n".join(analysis(arms, np.random.default_rng(0), elsewhere)))


if __name__ == "__main__":
    main()
