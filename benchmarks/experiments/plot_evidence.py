"""Print the tables of docs/evidence.md from benchmarks/data, and draw its figure.

python benchmarks/experiments/plot_evidence.py [--data benchmarks/data/evidence.jsonl.gz] [--figure docs/evidence.png]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from evidence_data import ENDS, Line, Runs, normalised, read, score, scores_of, trials_of
from score_statistics import (
    Array,
    Estimate,
    best_of,
    bootstrap,
    improvement_by_trials,
    interquartile_mean,
    probability_of_improvement,
    rank_correlation,
    successive_halving,
    worth_in_trials,
)
from score_tests import RankSum, fisher_exact

sys.path.append(str(Path(__file__).parents[1]))
from records import DATA, ROOT, read_lines

PRIMARY = ("cartpole", "acrobot", "lunar_lander")
"""The tasks of the primary comparison."""
HARDEST = "lunar_lander"
"""The only task that not every pool solves."""
FAILED = 0.8
"""A run on LunarLander with a score below this counts as failed."""
COMPARED = (
    ("low", "low_pool"),
    ("low", "low_small_moves"),
    ("low", "low_rare_moves"),
    ("low_rare_moves", "low_small_moves"),
    ("low_small_moves", "low_pool"),
    ("low_rare_moves", "low_pool"),
    ("low", "pool"),
    ("full", "pool"),
    ("hyperparameters", "pool"),
    ("selection", "pool"),
    ("hyperparameters", "selection"),
    ("burn_in", "hyperparameters"),
    ("burn_in", "pool"),
    ("full", "hyperparameters"),
    ("full", "shipped"),
    ("hyperparameters", "shipped"),
    ("selection", "shipped"),
    ("pool", "shipped"),
)
COLOURS = {
    "full": "C0", "hyperparameters": "C1", "selection": "C2", "pool": "C3", "shipped": "0.5",
    "low": "C4", "low_pool": "C5", "low_small_moves": "C6", "low_rare_moves": "C8",
    "burn_in": "k",
}  # fmt: skip


def used(line: Line) -> Array:
    """Return the cumulative steps of all agents at the end of each generation, evaluation included."""
    steps: Array = np.array([line["steps"], line["evaluation_steps"]], dtype=float).sum(0)
    return steps


def area(line: Line, until: float) -> float:
    """Return the mean score of the incumbent over the steps up to `until`; 0 during the first generation."""
    steps, scores = used(line), normalised(line["incumbent"], line["task"])
    ends = np.minimum(np.append(steps, until), until)
    return float(np.dot(np.diff(ends).clip(0), scores) / until)


def steps_to_solve(line: Line) -> float:
    """Return the steps until the incumbent's estimated score reaches 1; infinity if it never does."""
    solved = normalised(line["incumbent"], line["task"]) >= 1
    return float(used(line)[solved.argmax()]) if solved.any() else float("inf")


def arms_of(runs: Runs, task: str) -> list[str]:
    return [arm for arm in COLOURS if (task, arm) in runs]


def summary_table(runs: Runs, rng: np.random.Generator) -> Iterator[str]:
    """Yield one row per task and arm: scores, areas under the learning curve, steps to solve, and CPU time."""
    yield "| task | arm | runs | score | worst, best | solved | mean over steps | million steps to 1 | CPU s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for task in ENDS:
        lines = [line for arm in arms_of(runs, task) for line in runs[task, arm]]
        until = min((used(line)[-1] for line in lines), default=0.0)
        for arm in arms_of(runs, task):
            own = runs[task, arm]
            scores = np.array([score(line) for line in own])
            estimate = bootstrap(interquartile_mean, [scores], rng=rng)
            areas = bootstrap(interquartile_mean, [np.array([area(line, until) for line in own])], rng=rng)
            solved = sorted(steps_to_solve(line) for line in own)
            middle = solved[(len(solved) - 1) // 2]
            when = f"{middle / 1e6:.2f}" if np.isfinite(middle) else "none"
            yield (
                f"| {task} | `{arm}` | {len(own)} | {shown(estimate)} | {scores.min():.2f}, {scores.max():.2f} | "
                f"{sum(scores >= 1)} | {shown(areas)} | {when} | "
                f"{np.median([line['cpu_seconds'] for line in own]):.0f} |"
            )
    for arm in COLOURS:
        if all((task, arm) in runs for task in PRIMARY):
            groups = [np.array([score(line) for line in runs[task, arm]]) for task in PRIMARY]
            count = sum(int(sum(scores >= 1)) for scores in groups)
            estimate = bootstrap(interquartile_mean, groups, rng=rng)
            yield f"| all | `{arm}` | {sum(map(len, groups))} | {shown(estimate)} | | {count} | | | |"


def comparison_table(runs: Runs, rng: np.random.Generator) -> Iterator[str]:
    """Yield the probability of improvement of one arm over another, over all primary tasks and per task."""
    yield "| task | arm | over | runs | by the score | by the mean over steps |"
    yield "|---|---|---|---|---|---|"
    for name, tasks in (("all", PRIMARY), *((task, (task,)) for task in ENDS)):
        for pair in COMPARED:
            if any((task, arm) not in runs for arm in pair for task in tasks):
                continue
            compared = [[runs[task, arm] for task in tasks] for arm in pair]
            columns = []
            for measure in (score, _area_that_all_have(compared)):
                groups = [[np.array([measure(line) for line in lines]) for lines in arm] for arm in compared]
                columns.append(shown(bootstrap(probability_of_improvement, *groups, rng=rng)))
            counts = ", ".join(str(sum(map(len, arm))) for arm in compared)
            yield f"| {name} | `{pair[0]}` | `{pair[1]}` | {counts} | {columns[0]} | {columns[1]} |"


def _area_that_all_have(compared: Sequence[Sequence[Sequence[Line]]]) -> Callable[[Line], float]:
    """Return the `area` measure, up to the number of steps that all runs of a task have reached."""
    until: dict[str, float] = {}
    for line in (line for arm in compared for lines in arm for line in lines):
        until[line["task"]] = min(used(line)[-1], until.get(line["task"], np.inf))
    return lambda line: area(line, until[line["task"]])


def search_table(runs: Runs) -> Iterator[str]:
    """Yield the expected scores of best-of-k and successive halving on the pools' agents, as means over pools."""
    yield "| task | arm | best of 1 | of 2 | of 4 | of 8 | of 16 | halving | share of the steps |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for task in ENDS:
        for arm in arms_of(runs, task):
            pools = [line for line in runs[task, arm] if "members" in line]
            if not pools:
                continue
            rows = []
            for line in pools:
                fitness, scores = np.array(line["fitness"]), normalised(line["members"], task)
                rungs = [max(1, round(len(fitness) * share)) for share in (0.2, 0.4, 0.6)]
                halved, learned = successive_halving(fitness, scores, rungs)
                best = [best_of(k, fitness[-1], scores) for k in (1, 2, 4, 8, 16)]
                rows.append([*best, halved, learned / fitness.size])
            means = np.mean(rows, axis=0)
            yield f"| {task} | `{arm}` | " + " | ".join(f"{value:.2f}" for value in means) + " |"


def evaluation_table(runs: Runs) -> Iterator[str]:
    """Yield the evaluation steps of runs as a share of their training steps: the mean, the least and the most."""
    yield "| task | arm | runs | mean | least, most |"
    yield "|---|---|---|---|---|"
    for task in ENDS:
        for arm in arms_of(runs, task):
            found = np.array([line["evaluation_steps"][-1] / line["steps"][-1] for line in runs[task, arm]])
            yield f"| {task} | `{arm}` | {len(found)} | {found.mean():.0%} | {found.min():.0%}, {found.max():.0%} |"


def correlation_table(runs: Runs) -> Iterator[str]:
    """Yield the rank correlation of the fitness in each generation with the final agents' scores: means over pools."""
    yield "| task | arm | pools | rank correlation, generation by generation |"
    yield "|---|---|---|---|"
    for task in ENDS:
        for arm in ("pool", "shipped"):
            pools = runs.get((task, arm), ())
            if pools:
                found = [[rank_correlation(row, line["members"]) for row in line["fitness"]] for line in pools]
                listed = " ".join(f"{value:.2f}" for value in np.nanmean(found, axis=0))
                yield f"| {task} | `{arm}` | {len(pools)} | {listed} |"


def worth_table(runs: Runs, rng: np.random.Generator) -> Iterator[str]:
    """Yield the number of random trials that each arm is worth on LunarLander, by the agents of all its pools."""
    yield "| arm | runs | mean score | worth in random trials |"
    yield "|---|---|---|---|"
    pools = trials_of(runs[HARDEST, "pool"])
    for arm in arms_of(runs, HARDEST):
        found = scores_of(runs[HARDEST, arm])
        worth = worth_in_trials(found, pools, rng=rng)
        cells = f"{worth.value:.0f} ({worth.low:.0f} to {worth.high:.0f})"
        yield f"| `{arm}` | {len(found)} | {found.mean():.2f} | {cells} |"


def power_lines(rng: np.random.Generator) -> Iterator[str]:
    """Yield the power of rank tests with as many runs as the evidence has, and as more would have."""
    for ours, theirs, tasks in ((8, 6, 1), (8, 9, 1), (8, 8, 1), (8, 6, 2), (33, 33, 1)):
        test = RankSum(ours, theirs, tasks, rng=rng)
        where = "one task" if tasks == 1 else f"each of {tasks} tasks"
        yield (
            f"{ours} against {theirs} runs on {where}: power {test.power(0.7):.2f} for a true probability of 0.7, "
            f"and 0.80 for {test.distinguishable():.2f}"
        )


def limit_lines(runs: Runs, rng: np.random.Generator) -> Iterator[str]:
    """Yield what four times the trials would show, the failures on LunarLander, and comparisons with all its pools."""
    more = [improvement_by_trials(64, 16, np.concatenate(trials_of(runs[task, "pool"]))) for task in PRIMARY]
    each = ", ".join(f"{task} {value:.2f}" for task, value in zip(PRIMARY, more, strict=True))
    yield f"random search with 64 trials over one with 16: {np.mean(more):.2f} ({each})"
    groups = ("full", "hyperparameters"), ("pool",)
    failures, sizes = [], []
    for arms in groups:
        found = np.concatenate([scores_of(runs[HARDEST, arm]) for arm in arms])
        failures.append(int((found < FAILED).sum()))
        sizes.append(len(found))
    p = fisher_exact(*((count, size - count) for count, size in zip(failures, sizes, strict=True)))
    yield (
        f"runs on {HARDEST} below {FAILED}: {failures[0]} of {sizes[0]} ({' and '.join(groups[0])}), "
        f"{failures[1]} of {sizes[1]} (pool): p = {p:.2f}"
    )
    theirs = [scores_of(runs[HARDEST, "pool"])]
    for arm in ("full", "hyperparameters", "selection", "burn_in"):
        ours = [scores_of(runs[HARDEST, arm])]
        estimate = bootstrap(probability_of_improvement, ours, theirs, rng=rng)
        yield f"{HARDEST}, all runs: {arm} over pool ({len(ours[0])}, {len(theirs[0])}): {shown(estimate)}"


def birth_table(runs: Runs) -> Iterator[str]:
    """Yield the mean fraction of their generation that children of each kind beat; one half without an effect."""
    yield "| task | arm | none | hyperparameters | parameters | architecture |"
    yield "|---|---|---|---|---|---|"
    for task in ENDS:
        for arm in arms_of(runs, task):
            cells = []
            for kind in ("none", "hyperparameters", "parameters", "architecture"):
                found = [line["births"][kind] for line in runs[task, arm] if kind in line["births"]]
                count = sum(one[0] for one in found)
                mean = sum(one[0] * one[1] for one in found) / count if count else float("nan")
                cells.append(f"{mean:.3f} ({count})" if count else "")
            if any(cells):
                yield f"| {task} | `{arm}` | " + " | ".join(cells) + " |"


def replay_table(lines: Sequence[Line], rng: np.random.Generator) -> Iterator[str]:
    """Yield the scores of agents that replayed a winner's schedule, or used its last settings throughout."""
    yield "| winner | followed its schedule | had its last settings | schedule over last settings |"
    yield "|---|---|---|---|"
    groups: dict[str, list[Array]] = {"schedule": [], "constant": []}
    for winner in sorted({line["winner"] for line in lines}):
        task = winner.split("-")[0]
        cells = []
        for kind, found in groups.items():
            own = [line for line in lines if (line["winner"], line["kind"]) == (winner, kind)]
            found.append(normalised([line["held_out"]["mean"] for line in own], task))
            cells.append(" ".join(f"{value:.2f}" for value in np.sort(found[-1])))
        better = probability_of_improvement([groups["schedule"][-1]], [groups["constant"][-1]])
        yield f"| {winner} | {cells[0]} | {cells[1]} | {better:.2f} |"
    every = bootstrap(probability_of_improvement, groups["schedule"], groups["constant"], rng=rng)
    yield f"| all | | | {shown(every)} |"


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def draw(runs: Runs, picture: Path) -> None:
    """Plot for each task the incumbent's score over all steps: mean and range over runs."""
    tasks = [task for task in ENDS if any(key[0] == task for key in runs)]
    panels = [(task, arms) for task in tasks for arms in _panels(arms_of(runs, task))]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), sharey=True, squeeze=False)
    for axis, (task, arms) in zip(axes[0], panels, strict=True):
        for arm in arms:
            lines = runs[task, arm]
            grid = np.linspace(0, min(used(line)[-1] for line in lines), 200)
            curves = np.array([_course(line, grid) for line in lines])
            axis.plot(grid / 1e6, curves.mean(0), color=COLOURS[arm], label=f"{arm} ({len(lines)})")
            axis.fill_between(grid / 1e6, curves.min(0), curves.max(0), color=COLOURS[arm], alpha=0.12, linewidth=0)
        axis.axhline(1, color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(task)
        axis.set_xlabel("steps of all agents, evaluation included (millions)")
        axis.legend(loc="lower right", fontsize=8)
    axes[0][0].set_ylabel("score of the agent handed out")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _panels(arms: Sequence[str]) -> list[list[str]]:
    """Group the arms into panels; those with a low initial learning rate have a separate panel."""
    low = [arm for arm in arms if arm.startswith("low")]
    return [panel for panel in (low, [arm for arm in arms if arm not in low]) if panel]


def _course(line: Line, grid: Array) -> Array:
    """Return the incumbent's score at each number of steps: that of the last completed generation, 0 before any."""
    ended = np.searchsorted(used(line), grid, side="right")
    return np.append(0.0, normalised(line["incumbent"], line["task"]))[ended]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "evidence.jsonl.gz")
    parser.add_argument("--fresh", type=Path, default=DATA / "evidence_fresh_seeds.jsonl.gz")
    parser.add_argument("--replays", type=Path, default=DATA / "replays.jsonl.gz")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "evidence.png")
    parsed = parser.parse_args()
    runs, every = read(parsed.data), read(parsed.data, *([parsed.fresh] if parsed.fresh.is_file() else []))
    rng = np.random.default_rng(0)
    for rows in (summary_table(runs, rng), comparison_table(runs, rng), search_table(every), birth_table(runs)):
        print("\n".join(rows), end="\n\n")
    for rows in (evaluation_table(every), correlation_table(every)):
        print("\n".join(rows), end="\n\n")
    if all((HARDEST, arm) in every for arm in ("pool", "full", "hyperparameters", "selection", "burn_in")):
        fresh = np.random.default_rng(0)
        for rows in (worth_table(every, fresh), limit_lines(every, fresh), power_lines(fresh)):
            print("\n".join(rows), end="\n\n")
    if parsed.replays.is_file():
        print("\n".join(replay_table(read_lines(parsed.replays), rng)))
    draw(runs, parsed.figure)


if __name__ == "__main__":
    main()
