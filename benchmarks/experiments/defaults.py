"""Train shipped configurations with alternative defaults of evolution, and append one JSON line per run.

    python benchmarks/experiments/defaults.py --configs dqn a2c --arms small_moves larger_moves --seeds 1 2 3
    python benchmarks/experiments/defaults.py --table

Runs that have a line are not repeated. Each run is trained by `benchmarks/learning.py` with one process and one thread
until it reaches its target or its budget is spent. `--table` compares the arms of each configuration by the steps to
solve it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from score_statistics import bootstrap, probability_of_improvement

from evorl.config import AnyConfig, read_yaml, validate

sys.path.append(str(Path(__file__).parents[1]))
from learning import train
from records import ROOT, append, read_lines

DATA = ROOT / "benchmarks" / "data" / "defaults.jsonl.gz"
SETS = ROOT / "benchmarks" / "data" / "dqn_sets.jsonl.gz"
"""Runs of dqn.yaml on LunarLander at other revisions, ten seeds a line, by thousands of steps until solved."""
SMALL = {"grow": 1.2, "resample": 0.0}
LARGER = {"grow": 2.0, "resample": 0.25}
Arm = Callable[[AnyConfig], list[str]]
"""A function from a configuration to the overrides of an arm."""
Found = dict[str, dict[str, dict[int, dict[str, Any]]]]
"""Runs by configuration, arm and seed."""


def ranges(config: AnyConfig, moves: Mapping[str, float], least_rate: float | None = None) -> str:
    """Override the mutation moves of all ranges of the configuration, and optionally the minimum learning rate."""
    found = config.evolution.hyperparameters or {}
    changed = {name: {**range.model_dump(exclude={"shrink"}), **moves} for name, range in found.items()}
    if least_rate is not None:
        changed["learning_rate"]["min"] = least_rate
    return f"evolution.hyperparameters={json.dumps(changed)}"


def moving(moves: Mapping[str, float], *others: str) -> Arm:
    """Return the arm with these mutation moves and further overrides."""
    return lambda config: [*EARLY, ranges(config, moves), *others]


def without(kind: str) -> Arm:
    """Return the arm with small moves in which mutations of one `kind` are replaced by none."""

    def settings(config: AnyConfig) -> list[str]:
        weights = config.evolution.mutation.weights()
        changed = [f"evolution.mutation.{kind}=0", f"evolution.mutation.none={weights['none'] + weights[kind]}"]
        return [*EARLY, ranges(config, SMALL), *changed]

    return settings


def low(moves: Mapping[str, float]) -> Arm:
    """Return the arm with a tenth of the initial learning rate, and a range that extends down to a fiftieth of it."""

    def settings(config: AnyConfig) -> list[str]:
        rate = config.algorithm.first_hyperparameters()["learning_rate"]
        return [*EARLY, f"algorithm.learning_rate={rate / 10:g}", ranges(config, moves, rate / 50)]

    return settings


EARLY = "evolution.selection.replace=1", "evolution.burn_in=0"
"""Tournaments that replace all but the elite, from the first generation on: the defaults of earlier revisions."""
ARMS: Mapping[str, Arm] = {
    "early": lambda config: [*EARLY],
    "gentle": lambda config: ["evolution.selection.replace=0.25", "evolution.burn_in=0"],
    "late_gentle": lambda config: ["evolution.selection.replace=0.25", "evolution.burn_in=auto"],
    "small_moves": moving(SMALL),
    "larger_moves": moving(LARGER),
    "no_moves": without("hyperparameters"),
    "no_architecture": without("architecture"),
    "no_parameters": without("parameters"),
    "sampled": moving(SMALL, "evolution.initial=sampled"),
    "low_small_moves": low(SMALL),
    "low_larger_moves": low(LARGER),
}


def read(data: Path) -> Found:
    """Read the completed runs."""
    found: Found = defaultdict(lambda: defaultdict(dict))
    for run in read_lines(data):
        found[run["config"]][run["arm"]][run["seed"]] = run
    return found


def run_missing(configs: Sequence[str], arms: Sequence[str], seeds: Sequence[int], data: Path) -> None:
    """Train the missing runs seed by seed, so that the data are balanced whenever the benchmark is stopped."""
    for seed in seeds:
        for name in configs:
            path = ROOT / "configs" / "training" / f"{name}.yaml"
            config = validate(read_yaml(path))
            for arm in arms:
                if seed in read(data)[name][arm]:
                    continue
                settings = [*ARMS[arm](config), "run.threads=1"]
                with tempfile.TemporaryDirectory() as directory:
                    result = train(path, seed, 1, settings, Path(directory))
                append(data, {"config": name, "arm": arm, **result})


def steps(runs: Mapping[int, Mapping[str, Any]]) -> np.ndarray:
    """Return the steps per agent until each run was solved, in whole thousands; infinity if it was not.

    They are rounded since generations that end with an episode differ by a few steps, which should not decide.
    """
    return np.array([round(run["agent_steps"] / 1000) if run["solved"] else np.inf for run in runs.values()])


def fewer(found: Found, configs: Sequence[str], arm: str, other: str) -> str:
    """Format the probability, over configurations, that a run of one arm needs fewer steps than one of another."""
    both = [name for name in configs if arm in found[name] and other in found[name]]
    if arm == other or not both:
        return ""
    # Infinite steps are fine: the statistic uses only the order.
    pair = ([-steps(found[name][which]) for name in both] for which in (arm, other))
    result = bootstrap(probability_of_improvement, *pair, rng=np.random.default_rng(0))
    return f"{result.value:.2f} ({result.low:.2f} to {result.high:.2f})"


def over_all_sets(found: Found, sets: Path) -> str:
    """Format the probability that dqn.yaml needs fewer steps with larger moves, over the runs of all revisions."""
    all_steps = {arm: steps(found["dqn"][arm]) for arm in ("larger_moves", "small_moves")}
    for line in read_lines(sets):
        all_steps[line["arm"]] = np.append(all_steps[line["arm"]], line["steps"])
    larger, small = all_steps.values()
    result = bootstrap(probability_of_improvement, [-larger], [-small], rng=np.random.default_rng(0))
    counts = f"{len(larger)} and {len(small)} runs, medians {np.median(larger):.0f} and {np.median(small):.0f}"
    return f"{result.value:.2f} ({result.low:.2f} to {result.high:.2f}; {counts})"


def table(found: Found) -> list[str]:
    """Return one row per arm: its runs, and the comparisons with the arms of small and of larger moves."""
    rows = []
    for name, arms in found.items():
        for arm, runs in arms.items():
            low = "low_" if arm.startswith("low_") else ""
            listed = " ".join("not" if np.isinf(value) else f"{value:.0f}" for value in steps(runs))
            compared = [fewer(found, [name], arm, f"{low}{moves}_moves") for moves in ("small", "larger")]
            seconds = median(run["seconds"] for run in runs.values())
            fresh = median(run["fresh"]["mean"] for run in runs.values())
            cells = name, f"`{arm}`", listed, f"{median(steps(runs)):.0f}", *compared, f"{seconds:.0f}", f"{fresh:.1f}"
            rows.append("| " + " | ".join(cells) + " |")
    others = [name for name in found if name != "dqn"]
    rows.append(f"all but dqn, larger moves over small ones: {fewer(found, others, 'larger_moves', 'small_moves')}")
    rows.append(f"dqn at all revisions, larger moves over small ones: {over_all_sets(found, SETS)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", nargs="+", default=["dqn"])
    parser.add_argument("--arms", nargs="+", default=["small_moves", "larger_moves"], choices=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and train nothing")
    parsed = parser.parse_args()
    if parsed.table:
        print("\n".join(table(read(parsed.data))))
    else:
        run_missing(parsed.configs, parsed.arms, parsed.seeds, parsed.data)


if __name__ == "__main__":
    main()
